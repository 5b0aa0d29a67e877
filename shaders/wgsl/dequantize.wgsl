{# Included by kernels that read weights. Binds `weights` and `scales` as locals of the including shader and defines
   `weight_block(index)`: the 32 consecutive weights of one row that block `index` holds, as eight vec4<f32>.
   Blocks are interleaved by row: index = block * num_rows + row, so that neighbouring lanes read neighbouring words. #}
{% if FORMAT == "f32" %}
fn weight_block(index: u32) -> array<vec4<f32>, 8> {
    let base = index * 8u;
    return array<vec4<f32>, 8>(
        {% for i in range(8) %}
        bitcast<vec4<f32>>(weights[base + {{ i }}u]),
        {% endfor %}
    );
}
{% elif FORMAT == "f16" %}
fn halves(low: u32, high: u32) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(low), unpack2x16float(high));
}

fn weight_block(index: u32) -> array<vec4<f32>, 8> {
    let base = index * 4u;
    {% for i in range(4) %}
    let w{{ i }} = weights[base + {{ i }}u];
    {% endfor %}
    return array<vec4<f32>, 8>(
        {% for i in range(4) %}
        halves(w{{ i }}.x, w{{ i }}.y),
        halves(w{{ i }}.z, w{{ i }}.w),
        {% endfor %}
    );
}
{% elif FORMAT == "q4" %}
// Four-bit codes: byte j of the block holds weight j in its low and weight j + 16 in its high half; weight = d * code + m.
fn affine(codes: u32, scale: vec2<f32>) -> vec4<f32> {
    return fma(vec4<f32>(unpack4xU8(codes)), vec4<f32>(scale.x), vec4<f32>(scale.y));
}

fn weight_block(index: u32) -> array<vec4<f32>, 8> {
    let codes = weights[index];
    let low = codes & vec4<u32>(0x0f0f0f0fu);
    let high = (codes >> vec4<u32>(4u)) & vec4<u32>(0x0f0f0f0fu);
    let scale = unpack2x16float(scales[index]);
    return array<vec4<f32>, 8>(
        {% for part in ["low", "high"] %}
        {% for c in ["x", "y", "z", "w"] %}
        affine({{ part }}.{{ c }}, scale),
        {% endfor %}
        {% endfor %}
    );
}
{% else %}
// Eight-bit signed codes: weight = d * code.
fn scaled(codes: u32, d: f32) -> vec4<f32> {
    return vec4<f32>(unpack4xI8(codes)) * d;
}

fn weight_block(index: u32) -> array<vec4<f32>, 8> {
    let low = weights[index * 2u];
    let high = weights[index * 2u + 1u];
    let d = unpack2x16float(scales[index]).x;
    return array<vec4<f32>, 8>(
        {% for part in ["low", "high"] %}
        {% for c in ["x", "y", "z", "w"] %}
        scaled({{ part }}.{{ c }}, d),
        {% endfor %}
        {% endfor %}
    );
}
{% endif %}
