{# Included by kernels that read weights. Uses `params` of the including shader and defines
   `weight_block(block, row)`: the 32 consecutive weights of a row that a block holds, as eight vec4<f32>.
   Blocks are interleaved by row (`block_index`), so that neighbouring lanes read neighbouring words. #}
{% include "weights.wgsl" %}
{% if FORMAT == "f32" %}
fn weight_block(block: u32, row: u32) -> array<vec4<f32>, 8> {
    let base = block_index(block, row) * 8u;
    return array<vec4<f32>, 8>(
        {% for i in range(8) %}
        bitcast<vec4<f32>>(codes_at(base + {{ i }}u)),
        {% endfor %}
    );
}
{% elif FORMAT in ["f16", "bf16"] %}
{% if FORMAT == "f16" %}
fn halves(low: u32, high: u32) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(low), unpack2x16float(high));
}
{% else %}
// The upper halves of f32 numbers, two a word.
fn halves(low: u32, high: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(vec4<u32>(low << 16u, low & 0xffff0000u, high << 16u, high & 0xffff0000u));
}
{% endif %}

fn weight_block(block: u32, row: u32) -> array<vec4<f32>, 8> {
    let base = block_index(block, row) * 4u;
    {% for i in range(4) %}
    let w{{ i }} = codes_at(base + {{ i }}u);
    {% endfor %}
    return array<vec4<f32>, 8>(
        {% for i in range(4) %}
        halves(w{{ i }}.x, w{{ i }}.y),
        halves(w{{ i }}.z, w{{ i }}.w),
        {% endfor %}
    );
}
{% elif FORMAT in ["q4", "q5", "q4k", "q5k"] %}
// Four-bit codes: byte j of the block holds weight j in its low and weight j + 16 in its high half; weight = d * code + m. Of
// five-bit ones, bit 8b + k of the second scale word is the fifth of weight 4k + b. The K formats' scale and minimum are
// bytes, in units (d, -dmin) that eight blocks share.
fn affine(codes: u32, scale: vec2<f32>) -> vec4<f32> {
    return fma(vec4<f32>(unpack4xU8(codes)), vec4<f32>(scale.x), vec4<f32>(scale.y));
}

fn weight_block(block: u32, row: u32) -> array<vec4<f32>, 8> {
    let index = block_index(block, row);
    let codes = codes_at(index);
    {% if FORMAT in ["q4", "q5"] %}
    let scale = unpack2x16float(scale_word(index, 0u));
    {% else %}
    let scale = scale_bytes(scale_word(index, 0u)) * units_of(block, row);
    {% endif %}
    {% if FORMAT in ["q4", "q4k"] %}
    let low = codes & vec4<u32>(0x0f0f0f0fu);
    let high = (codes >> vec4<u32>(4u)) & vec4<u32>(0x0f0f0f0fu);
    {% else %}
    let fifth = scale_word(index, 1u);
    let low = (codes & vec4<u32>(0x0f0f0f0fu)) | fifth_bits(fifth, 0u);
    let high = ((codes >> vec4<u32>(4u)) & vec4<u32>(0x0f0f0f0fu)) | fifth_bits(fifth, 4u);
    {% endif %}
    return array<vec4<f32>, 8>(
        {% for part in ["low", "high"] %}
        {% for c in ["x", "y", "z", "w"] %}
        affine({{ part }}.{{ c }}, scale),
        {% endfor %}
        {% endfor %}
    );
}
{% elif FORMAT == "q6k" %}
// Six-bit codes around 32: the lower four as q4, the upper two of each sixteen in a scale word of their own (bits 8b + 2k
// are those of weight 4k + b); each sixteen has its own signed scale.
fn around(codes: u32, scale: f32) -> vec4<f32> {
    return (vec4<f32>(unpack4xU8(codes)) - vec4<f32>(32.0)) * scale;
}

fn weight_block(block: u32, row: u32) -> array<vec4<f32>, 8> {
    let index = block_index(block, row);
    let codes = codes_at(index);
    let scale = scale_bytes(scale_word(index, 0u)) * units_of(block, row).x;
    let low = (codes & vec4<u32>(0x0f0f0f0fu)) | upper_pairs(scale_word(index, 1u));
    let high = ((codes >> vec4<u32>(4u)) & vec4<u32>(0x0f0f0f0fu)) | upper_pairs(scale_word(index, 2u));
    return array<vec4<f32>, 8>(
        {% for part, scale in [["low", "x"], ["high", "y"]] %}
        {% for c in ["x", "y", "z", "w"] %}
        around({{ part }}.{{ c }}, scale.{{ scale }}),
        {% endfor %}
        {% endfor %}
    );
}
{% else %}
// Eight-bit signed codes: weight = d * code.
fn scaled(codes: u32, d: f32) -> vec4<f32> {
    return vec4<f32>(unpack4xI8(codes)) * d;
}

fn weight_block(block: u32, row: u32) -> array<vec4<f32>, 8> {
    let index = block_index(block, row);
    let low = codes_at(index * 2u);
    let high = codes_at(index * 2u + 1u);
    let d = unpack2x16float(scale_word(index, 0u)).x;
    return array<vec4<f32>, 8>(
        {% for part in ["low", "high"] %}
        {% for c in ["x", "y", "z", "w"] %}
        scaled({{ part }}.{{ c }}, d),
        {% endfor %}
        {% endfor %}
    );
}
{% endif %}
