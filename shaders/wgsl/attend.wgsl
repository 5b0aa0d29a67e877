{# Included by both attention kernels: HEADS query heads of one KV head in registers, and `fold(row, seen)` which folds one
   cached token into their running softmax (Milakov & Gimelshein, "Online normalizer calculation for softmax", 2018). The
   token's key and value are loaded once for all of them; with SHARE the lanes of a subgroup of eight, which are at one
   token, load a part each and pass it round. #}
{% include "cached_row.wgsl" %}
{% for h in range(HEADS) %}
{% for i in range(HEAD_DIM // 4) %}
var<private> q{{ h }}_{{ i }}: vec4<f32>;
var<private> acc{{ h }}_{{ i }}: vec4<f32>;
{% endfor %}
var<private> score_max{{ h }}: f32;
var<private> weight_sum{{ h }}: f32;
{% endfor %}

// From the first of the query heads on.
fn begin(query_base: u32) {
    {% for h in range(HEADS) %}
    {% for i in range(HEAD_DIM // 4) %}
    q{{ h }}_{{ i }} = query[query_base + {{ h * HEAD_DIM // 4 + i }}u] * params.scale;
    acc{{ h }}_{{ i }} = vec4<f32>(0.0);
    {% endfor %}
    score_max{{ h }} = LOWEST;
    weight_sum{{ h }} = 0.0;
    {% endfor %}
}

{% include "score.wgsl" %}

fn fold(row: Row, seen: bool, lane: u32) {
    {% set CACHE = "key_cache" %}
    {% set NAME = "k" %}
    {% include "load_row.wgsl" %}
    {% for h in range(HEADS) %}
    var products{{ h }} = vec4<f32>(0.0);
    {% for i in range(HEAD_DIM // 4) %}
    products{{ h }} = fma(q{{ h }}_{{ i }}, k{{ i }}, products{{ h }});
    {% endfor %}
    let score{{ h }} = capped(products{{ h }});
    {% endfor %}
    {% set CACHE = "value_cache" %}
    {% set NAME = "v" %}
    {% include "load_row.wgsl" %}
    if (!seen) {
        return;
    }
    {% for h in range(HEADS) %}
    {
        let score = score{{ h }};
        if (score > score_max{{ h }}) {
            let shrink = exp(score_max{{ h }} - score);
            {% for i in range(HEAD_DIM // 4) %}
            acc{{ h }}_{{ i }} *= shrink;
            {% endfor %}
            weight_sum{{ h }} *= shrink;
            score_max{{ h }} = score;
        }
        let weight = exp(score - score_max{{ h }});
        weight_sum{{ h }} += weight;
        {% for i in range(HEAD_DIM // 4) %}
        acc{{ h }}_{{ i }} = fma(vec4<f32>(weight), v{{ i }}, acc{{ h }}_{{ i }});
        {% endfor %}
    }
    {% endfor %}
}
