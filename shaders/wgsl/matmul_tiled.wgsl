// As matmul, for many tokens on hardware: a workgroup computes TILE rows of TILE tokens, and all its lanes share what it stages
// of both: a block of 32 along k at a time.
//
// ARITHMETIC is f32, which sums an element in matmul's order, slice by slice, so that nobody can tell them apart; f16, whose
// products within a block are in half precision and whose sums over blocks are not; or matrix16 and matrix8, where subgroups
// of 32 lanes multiply matrices of that size, of f16 into f32.
{% if ARITHMETIC != "f32" %}
enable f16;
{% endif %}
{% if ARITHMETIC in ["matrix8", "matrix16"] %}
enable wgpu_cooperative_matrix;
{% endif %}

struct Params {
    num_rows: u32,       // rows of this shard
    row_start: u32,      // first output column of this shard
    num_blocks: u32,     // blocks of 32 along k
    num_tokens: u32,     // end of the tokens
    output_stride: u32,  // columns of a whole output row
    accumulate: u32,
    first_token: u32,
    pad0: u32,
}

@group(0) @binding(2) var<storage, read> input: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> output: array<f32>;
@group(0) @binding(4) var<uniform> params: Params;

const TILE: u32 = 64u;
const WORKGROUP_SIZE: u32 = 256u;
{% if ARITHMETIC == "f32" %}
// As many as matmul's on hardware.
const SLICES: u32 = 8u;
{% endif %}

{% set IMAGE = 0 %}
{% include "dequantize.wgsl" %}

{% include "store.wgsl" %}

{% if ARITHMETIC != "f32" %}
const LARGEST_HALF: f32 = 65504.0;

// The nearest number of half precision. One that is too large becomes the largest; a NaN or an infinity stays what it is, so
// that it shows, as do products that overflow.
fn half(x: vec4<f32>) -> vec4<f16> {
    let is_large = abs(x) > vec4<f32>(LARGEST_HALF) & abs(x) < vec4<f32>(3.0e38);
    return vec4<f16>(select(x, sign(x) * LARGEST_HALF, is_large));
}
{% endif %}

{% if ARITHMETIC in ["matrix8", "matrix16"] %}
{% set N = 8 if ARITHMETIC == "matrix8" else 16 %}
{# Matrices along a side of the tile, and those that each of eight subgroups has. #}
{% set SIDE = 64 // N %}
{% set OWN = SIDE * SIDE // 8 %}
const NAN: u32 = 0x7fc00000u;
// [row or token][k], and a matrix of results by subgroup.
var<workgroup> rows: array<f16, {{ 64 * 32 }}>;
var<workgroup> tokens: array<f16, {{ 64 * 32 }}>;
var<workgroup> results: array<f32, {{ 8 * N * N }}>;

{% for what in ["row", "token"] %}
fn stage_{{ what }}(index: u32, i: u32, values: vec4<f32>) {
    let v = half(values);
    {% for c in ["x", "y", "z", "w"] %}
    {{ what }}s[index * 32u + 4u * i + {{ loop.index0 }}u] = v.{{ c }};
    {% endfor %}
}
{% endfor %}
{% else %}
{% set SCALAR = ARITHMETIC %}
// [k / 4][row or token], so that neighbouring lanes read neighbouring values.
var<workgroup> rows: array<vec4<{{ SCALAR }}>, {{ 64 * 8 }}>;
var<workgroup> tokens: array<vec4<{{ SCALAR }}>, {{ 64 * 8 }}>;

{% for what in ["row", "token"] %}
fn stage_{{ what }}(index: u32, i: u32, values: vec4<f32>) {
    {{ what }}s[i * TILE + index] = {{ "half(values)" if ARITHMETIC == "f16" else "values" }};
}
{% endfor %}
{% endif %}

{# What a lane adds up before it adds it to its sums: over a slice, or over a block in half precision. #}
{% macro parts(scalar) %}
{% for r in range(4) %}
{% for t in range(4) %}
var part{{ r }}_{{ t }} = vec4<{{ scalar }}>(0.0);
{% endfor %}
{% endfor %}
{% endmacro %}
{% macro products() %}
{% for i in range(8) %}
{
    {% for n in range(4) %}
    let w{{ n }} = rows[{{ 64 * i + 16 * n }}u + own_row];
    let x{{ n }} = tokens[{{ 64 * i + 16 * n }}u + own_token];
    {% endfor %}
    {% for r in range(4) %}
    {% for t in range(4) %}
    part{{ r }}_{{ t }} = fma(w{{ r }}, x{{ t }}, part{{ r }}_{{ t }});
    {% endfor %}
    {% endfor %}
}
{% endfor %}
{% endmacro %}
{% macro sums() %}
{% for r in range(4) %}
{% for t in range(4) %}
{
    let part = vec4<f32>(part{{ r }}_{{ t }});
    sum{{ r }}_{{ t }} += (part.x + part.y) + (part.z + part.w);
}
{% endfor %}
{% endfor %}
{% endmacro %}

// Brings a block of the tile's rows and tokens in: a row by a lane of the first 64, a token's 32 values by eight lanes.
fn stage(block: u32, first_row: u32, first_token: u32, lane: u32) {
    if (lane < TILE) {
        let values = weight_block(block, min(first_row + lane, params.num_rows - 1u));
        {% for i in range(8) %}
        stage_row(lane, {{ i }}u, values[{{ i }}]);
        {% endfor %}
    }
    {% for part in range(2) %}
    {
        let token = {{ 32 * part }}u + lane / 8u;
        let i = lane % 8u;
        let source = min(first_token + token, params.num_tokens - 1u);
        stage_token(token, i, input[(source * params.num_blocks + block) * 8u + i]);
    }
    {% endfor %}
}

@compute @workgroup_size(WORKGROUP_SIZE)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
    {% if ARITHMETIC in ["matrix8", "matrix16"] %}
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
    @builtin(num_subgroups) num_subgroups: u32,
    {% endif %}
) {
    let first_row = workgroup.x * TILE;
    let first_token = params.first_token + workgroup.y * TILE;
    {% if ARITHMETIC in ["matrix8", "matrix16"] %}
    let own_row = (subgroup % {{ SIDE }}u) * {{ N }}u;
    let own_token = (subgroup / {{ SIDE }}u) * {{ N * OWN }}u;
    {% for j in range(OWN) %}
    var sum{{ j }} = coop_mat{{ N }}x{{ N }}<f32, C>();
    {% endfor %}
    for (var block = 0u; block < params.num_blocks; block++) {
        stage(block, first_row, first_token, lane);
        workgroupBarrier();
        {% for k in range(0, 32, N) %}
        {
            let a = coopLoadT<coop_mat{{ N }}x{{ N }}<f16, A>>(&rows[own_row * 32u + {{ k }}u], 32u);
            {% for j in range(OWN) %}
            // Tokens are columns.
            let b{{ j }} = coopLoad<coop_mat{{ N }}x{{ N }}<f16, B>>(&tokens[(own_token + {{ N * j }}u) * 32u + {{ k }}u], 32u);
            sum{{ j }} = coopMultiplyAdd(a, b{{ j }}, sum{{ j }});
            {% endfor %}
        }
        {% endfor %}
        workgroupBarrier();
    }
    {% for j in range(OWN) %}
    coopStoreT(sum{{ j }}, &results[subgroup * {{ N * N }}u], {{ N }}u);
    workgroupBarrier();
    for (var i = subgroup_lane; i < {{ N * N }}u; i += 32u) {
        let token = first_token + own_token + {{ N * j }}u + i % {{ N }}u;
        // Of other subgroups than these nothing would be right, and a NaN says so.
        let value = select(bitcast<u32>(results[subgroup * {{ N * N }}u + i]), NAN, num_subgroups != 8u);
        store(token, first_row + own_row + i / {{ N }}u, bitcast<f32>(value));
    }
    workgroupBarrier();
    {% endfor %}
    {% else %}
    // A lane has four rows of four tokens, sixteen apart.
    let own_row = lane % 16u;
    let own_token = lane / 16u;
    {% for r in range(4) %}
    {% for t in range(4) %}
    var sum{{ r }}_{{ t }} = 0.0;
    {% endfor %}
    {% endfor %}
    {% if ARITHMETIC == "f32" %}
    for (var slice = 0u; slice < min(SLICES, params.num_blocks); slice++) {
        {{ parts("f32") }}
        for (var block = slice; block < params.num_blocks; block += SLICES) {
            stage(block, first_row, first_token, lane);
            workgroupBarrier();
            {{ products() }}
            workgroupBarrier();
        }
        {{ sums() }}
    }
    {% else %}
    for (var block = 0u; block < params.num_blocks; block++) {
        stage(block, first_row, first_token, lane);
        workgroupBarrier();
        {{ parts("f16") }}
        {{ products() }}
        {{ sums() }}
        workgroupBarrier();
    }
    {% endif %}
    {% for r in range(4) %}
    {% for t in range(4) %}
    store(first_token + own_token + {{ 16 * t }}u, first_row + own_row + {{ 16 * r }}u, sum{{ r }}_{{ t }});
    {% endfor %}
    {% endfor %}
    {% endif %}
    {% if FORMAT in ["f32", "f16", "bf16"] %}
    keep_scales();
    {% endif %}
}
