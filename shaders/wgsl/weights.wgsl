{# Included by kernels that read weights, as bindings 0 and 1: what a matrix's shard holds, and where a block of it lies. Uses
   `params` of the including shader; the layout is engine/src/kernels/weights.rs's and repack.rs's. With IMAGE the words are
   texels: Mesa's software adapters load those of all lanes at once, and the words of buffers one after the other. #}
{% set SCALE_WORDS = {"f32": 0, "f16": 0, "bf16": 0, "q4": 1, "q5": 2, "q8": 1, "q4k": 1, "q5k": 2, "q6k": 3}[FORMAT] %}
{% if IMAGE == 1 %}
@group(0) @binding(0) var weights: texture_storage_2d<rgba32uint, read>;
@group(0) @binding(1) var scales: texture_storage_2d<r32uint, read>;

// Texels follow each other in rows of 1024.
fn texel(index: u32) -> vec2<u32> {
    return vec2<u32>(index & 1023u, index >> 10u);
}

fn codes_at(index: u32) -> vec4<u32> {
    return textureLoad(weights, texel(index));
}

fn scales_at(index: u32) -> u32 {
    return textureLoad(scales, texel(index)).x;
}
{% else %}
@group(0) @binding(0) var<storage, read> weights: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> scales: array<u32>;

fn codes_at(index: u32) -> vec4<u32> {
    return weights[index];
}

fn scales_at(index: u32) -> u32 {
    return scales[index];
}
{% endif %}

// Rows lie in tiles of 32: a tile's blocks one behind the other, its rows side by side within each.
fn block_index(block: u32, row: u32) -> u32 {
    let first = row & ~31u;
    return first * params.num_blocks + block * min(32u, params.num_rows - first) + (row - first);
}

{% if SCALE_WORDS == 0 %}
// A binding that no statement names is none of the pipeline's.
fn keep_scales() {
    {% if IMAGE == 1 %}
    _ = textureDimensions(scales);
    {% else %}
    _ = &scales;
    {% endif %}
}
{% else %}
fn scale_word(index: u32, word: u32) -> u32 {
    return scales_at(index * {{ SCALE_WORDS }}u + word);
}
{% endif %}
{% if FORMAT in ["q5", "q5k"] %}
// The fifth bits of sixteen codes, in place to be joined with the lower four.
fn fifth_bits(bits: u32, first: u32) -> vec4<u32> {
    let shifted = vec4<u32>(bits >> first) >> vec4<u32>(0u, 1u, 2u, 3u);
    return (shifted & vec4<u32>(0x01010101u)) << vec4<u32>(4u);
}
{% endif %}
{% if FORMAT == "q6k" %}
// The upper two bits of sixteen codes, in place to be joined with the lower four.
fn upper_pairs(bits: u32) -> vec4<u32> {
    let shifted = vec4<u32>(bits) >> vec4<u32>(0u, 2u, 4u, 6u);
    return (shifted & vec4<u32>(0x03030303u)) << vec4<u32>(4u);
}
{% endif %}
{% if FORMAT in ["q4k", "q5k"] %}
fn scale_bytes(word: u32) -> vec2<f32> {
    return vec2<f32>(f32(word & 0xffu), f32(word >> 8u));
}
{% elif FORMAT == "q6k" %}
fn scale_bytes(word: u32) -> vec2<f32> {
    return vec2<f32>(f32(extractBits(i32(word), 0u, 8u)), f32(extractBits(i32(word), 8u, 8u)));
}
{% endif %}
{% if FORMAT in ["q4k", "q5k", "q6k"] %}
// What a row's scales are in units of, for eight blocks: they lie behind all blocks' scale words.
fn units_of(block: u32, row: u32) -> vec2<f32> {
    let behind = params.num_blocks * params.num_rows * {{ SCALE_WORDS }}u;
    let first = row & ~31u;
    let index = first * (params.num_blocks / 8u) + (block / 8u) * min(32u, params.num_rows - first) + (row - first);
    return unpack2x16float(scales_at(behind + index));
}
{% endif %}
