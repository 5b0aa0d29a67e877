// Takes the queries, keys and values of a step apart: queries to their own buffer, keys and values into their slots of the
// paged cache: KV f16 packs pairs, q8_0 rounds blocks of 32 values to signed bytes; heads of queries and keys are normalised before (NORM) and rotated by their token's
// position.
//
// A row of qkv holds query heads, key heads, value heads. One workgroup a head of a token; a lane writes words (pairs of
// neighbouring values; of bytes, the 64 whose scales share a word). rotations[token, pair] = (cos, sin) of position * frequency, computed by the host in f64: the GPU's
// own sine loses digits at large positions. With pair_stride 1 a pair is two neighbours (x[2i], x[2i + 1]), the order of
// GGUF's llama; with pair_stride = num_pairs it is one of each half (x[i], x[i + num_pairs]), everybody else's; values past
// 2 * num_pairs stay. slot = block_id * BLOCK_SIZE + offset; one layer's cache is [block, kv_head, offset, head_dim],
// and with q8_0 the scales of a block's rows lie behind its rows (cached_row.wgsl).

struct Params {
    num_heads: u32,
    num_kv_heads: u32,
    head_dim: u32,
    num_pairs: u32,    // 0 rotates nothing
    pair_stride: u32,
    epsilon: f32,
    pad0: u32,
    pad1: u32,
}

@group(0) @binding(0) var<storage, read> rotations: array<vec2<f32>>;
@group(0) @binding(1) var<storage, read> qkv: array<f32>;
@group(0) @binding(2) var<storage, read> slot_mapping: array<u32>;
// Weights of query heads, then of key heads.
@group(0) @binding(3) var<storage, read> head_norms: array<f32>;
@group(0) @binding(4) var<storage, read_write> query: array<f32>;
@group(0) @binding(5) var<storage, read_write> key_cache: array<u32>;
@group(0) @binding(6) var<storage, read_write> value_cache: array<u32>;
@group(0) @binding(7) var<uniform> params: Params;

const BLOCK_SIZE: u32 = {{ BLOCK_SIZE }}u;
const WORKGROUP_SIZE: u32 = {{ WORKGROUP_SIZE }}u;

// The head at hand: where it begins, its norm's weights and scale, its token's rotations.
var<private> base: u32;
var<private> rotation_base: u32;
{% if NORM == 1 %}
var<private> norm_base: u32;
var<private> norm_scale: f32;
{% include "sum.wgsl" %}
{% endif %}

fn normed(i: u32) -> f32 {
    {% if NORM == 1 %}
    return qkv[base + i] * norm_scale * head_norms[norm_base + i];
    {% else %}
    return qkv[base + i];
    {% endif %}
}

fn rotated(i: u32) -> f32 {
    if (i >= 2u * params.num_pairs) {
        return normed(i);
    }
    var pair = i >> 1u;
    var is_second = (i & 1u) == 1u;
    var first = i & ~1u;
    if (params.pair_stride != 1u) {
        is_second = i >= params.num_pairs;
        pair = select(i, i - params.num_pairs, is_second);
        first = pair;
    }
    let rotation = rotations[rotation_base + pair];
    let a = normed(first);
    let b = normed(first + params.pair_stride);
    return select(fma(a, rotation.x, -(b * rotation.y)), fma(a, rotation.y, b * rotation.x), is_second);
}

{% if KV == "q8_0" %}
const EXPONENT: u32 = 0x7f800000u;
const HALF_NAN: u32 = 0x7e00u;

// Of a value or of a key.
fn value_of(i: u32, is_value: bool) -> f32 {
    if (is_value) {
        return qkv[base + i];
    }
    return rotated(i);
}

// Rounds values first..first + 32 of the head at hand and writes their codes from `word` on; returns the scale's bits.
fn round_block(first: u32, is_value: bool, word: u32) -> u32 {
    var x: array<vec4<f32>, 8>;
    var peak = 0.0;
    var broken = false;
    for (var i = 0u; i < 8u; i++) {
        let at = first + 4u * i;
        let v = vec4<f32>(
            value_of(at, is_value), value_of(at + 1u, is_value), value_of(at + 2u, is_value), value_of(at + 3u, is_value)
        );
        x[i] = v;
        peak = max(max(peak, max(abs(v.x), abs(v.y))), max(abs(v.z), abs(v.w)));
        // On the bits: WGSL may assume that values are finite.
        broken = broken || any((bitcast<vec4<u32>>(v) & vec4<u32>(EXPONENT)) == vec4<u32>(EXPONENT));
    }
    // Codes are of the scale as it is stored. One past f16 is infinite, so that the row shows it.
    let bits = pack2x16float(vec2<f32>(peak / 127.0, 0.0)) & 0xffffu;
    let scale = unpack2x16float(bits).x;
    let inverse = select(0.0, 1.0 / scale, scale > 0.0);
    for (var i = 0u; i < 8u; i++) {
        let codes = pack4xI8(vec4<i32>(clamp(round(x[i] * inverse), vec4<f32>(-127.0), vec4<f32>(127.0))));
        if (is_value) {
            value_cache[word + i] = codes;
        } else {
            key_cache[word + i] = codes;
        }
    }
    return select(bits, HALF_NAN, broken || peak > 8.0e6);
}
{% endif %}

@compute @workgroup_size(WORKGROUP_SIZE)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
    {% if NORM == 1 and SUM == "subgroups" %}
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
    @builtin(num_subgroups) num_subgroups: u32,
    {% endif %}
) {
    let head = workgroup.x;
    let token = workgroup.y;
    let num_words = params.head_dim / 2u;
    base = (token * (params.num_heads + 2u * params.num_kv_heads) + head) * params.head_dim;
    rotation_base = token * params.num_pairs;
    {% if NORM == 1 %}
    norm_base = select(0u, params.head_dim, head >= params.num_heads);
    var sum = 0.0;
    for (var i = lane; i < params.head_dim; i += WORKGROUP_SIZE) {
        let x = qkv[base + i];
        sum = fma(x, x, sum);
    }
    let squares = sum_of_all(sum, {% if SUM == "subgroups" %}Place(subgroup, subgroup_lane, num_subgroups){% else %}lane{% endif %});
    norm_scale = 1.0 / sqrt(squares / f32(params.head_dim) + params.epsilon);
    {% else %}
    _ = &head_norms;
    {% endif %}
    if (head < params.num_heads) {
        let target_base = (token * params.num_heads + head) * params.head_dim;
        for (var word = lane; word < num_words; word += WORKGROUP_SIZE) {
            query[target_base + 2u * word] = rotated(2u * word);
            query[target_base + 2u * word + 1u] = rotated(2u * word + 1u);
        }
        return;
    }
    let slot = slot_mapping[token];
    let block_id = slot / BLOCK_SIZE;
    let offset = slot - block_id * BLOCK_SIZE;
    let is_value = head >= params.num_heads + params.num_kv_heads;
    let kv_head = head - params.num_heads - select(0u, params.num_kv_heads, is_value);
    {% if KV == "q8_0" %}
    let row_words = params.head_dim / 4u;
    let scale_words = (params.head_dim + 63u) / 64u;
    let block = (block_id * params.num_kv_heads + kv_head) * BLOCK_SIZE * (row_words + scale_words);
    // A lane rounds the 64 values, or the 32 that are left, whose scales share a word.
    for (var word = lane; word < scale_words; word += WORKGROUP_SIZE) {
        let row = block + offset * row_words + word * 16u;
        var scales = round_block(word * 64u, is_value, row);
        if (word * 64u + 32u < params.head_dim) {
            scales |= round_block(word * 64u + 32u, is_value, row + 8u) << 16u;
        }
        let target_word = block + BLOCK_SIZE * row_words + offset * scale_words + word;
        if (is_value) {
            value_cache[target_word] = scales;
        } else {
            key_cache[target_word] = scales;
        }
    }
    {% else %}
    let target_base = ((block_id * params.num_kv_heads + kv_head) * BLOCK_SIZE + offset) * num_words;
    for (var word = lane; word < num_words; word += WORKGROUP_SIZE) {
        if (is_value) {
            value_cache[target_base + word] = pack2x16float(vec2<f32>(qkv[base + 2u * word], qkv[base + 2u * word + 1u]));
        } else {
            key_cache[target_base + word] = pack2x16float(vec2<f32>(rotated(2u * word), rotated(2u * word + 1u)));
        }
    }
    {% endif %}
}
