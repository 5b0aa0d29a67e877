{# Included by attend.wgsl, once for keys and once for values: defines {{ NAME }}0 and on, four values each, of the row `row`
   of {{ CACHE }}. With SHARE each of eight lanes loads a part, and all get all. #}
{% set WORDS4 = HEAD_DIM // 16 if KV == "q8_0" else HEAD_DIM // 8 %}
{% if SHARE == 1 %}
{% for c in range((WORDS4 + 7) // 8) %}
let {{ NAME }}_mine{{ c }} = {{ CACHE }}[row.values + min({{ 8 * c }}u + lane, {{ WORDS4 - 1 }}u)];
{% endfor %}
{% endif %}
{% if KV == "q8_0" %}
{% for s in range((HEAD_DIM + 63) // 64) %}
let {{ NAME }}_scale{{ s }} = unpack2x16float({{ CACHE }}[(row.scales + {{ s }}u) >> 2u][(row.scales + {{ s }}u) & 3u]);
{% endfor %}
{% endif %}
{% for i in range(WORDS4) %}
{% if SHARE == 1 %}
let {{ NAME }}_words{{ i }} = subgroupBroadcast({{ NAME }}_mine{{ i // 8 }}, {{ i % 8 }}u);
{% else %}
let {{ NAME }}_words{{ i }} = {{ CACHE }}[row.values + {{ i }}u];
{% endif %}
{% if KV == "q8_0" %}
{% for c in ["x", "y", "z", "w"] %}
let {{ NAME }}{{ 4 * i + loop.index0 }} = vec4<f32>(unpack4xI8({{ NAME }}_words{{ i }}.{{ c }})) * {{ NAME }}_scale{{ i // 4 }}.{{ "x" if i % 4 < 2 else "y" }};
{% endfor %}
{% else %}
let {{ NAME }}{{ 2 * i }} = halves({{ NAME }}_words{{ i }}.x, {{ NAME }}_words{{ i }}.y);
let {{ NAME }}{{ 2 * i + 1 }} = halves({{ NAME }}_words{{ i }}.z, {{ NAME }}_words{{ i }}.w);
{% endif %}
{% endfor %}
