// Attention of one query token a sequence over its block table, in splits of a constant SPLIT tokens.
//
// One invocation handles HEADS heads of one KV head of one (sequence, split) without a barrier, or with TEAM, on hardware, one
// workgroup does. It leaves a partial result of each head: [HEAD_DIM accumulators, maximum, sum, 2 unused]; paged_attention_reduce merges the splits of a sequence in order.
// splits[i] = (sequence, split index within the sequence). The split length is constant, so the order in which a head
// is reduced depends on its context length alone.

struct Params {
    num_splits: u32,
    num_heads: u32,
    num_kv_heads: u32,
    block_table_stride: u32,
    scale: f32,
    row_width: u32,    // invocations, or workgroups, a grid row, since a grid dimension is bounded
    soft_cap: f32,     // 0 leaves scores
    window: u32,       // tokens that a query sees; 0 for all
}

@group(0) @binding(0) var<storage, read> query: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> key_cache: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> value_cache: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> block_tables: array<u32>;
@group(0) @binding(4) var<storage, read> context_lens: array<u32>;
@group(0) @binding(5) var<storage, read> splits: array<vec2<u32>>;
@group(0) @binding(6) var<storage, read_write> partials: array<vec4<f32>>;
@group(0) @binding(7) var<uniform> params: Params;

const BLOCK_SIZE: u32 = {{ BLOCK_SIZE }}u;
const SPLIT: u32 = {{ SPLIT }}u;
const HEAD_DIM4: u32 = {{ HEAD_DIM // 4 }}u;
const LOWEST: f32 = -3.0e38;

{% if TEAM == 1 %}
{% include "decode_team.wgsl" %}
{% else %}
{% set SHARE = 0 %}
{% include "attend.wgsl" %}

@compute @workgroup_size({{ WORKGROUP_SIZE }})
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let num_groups = params.num_heads / {{ HEADS }}u;
    let index = id.y * params.row_width + id.x;
    if (id.x >= params.row_width || index >= params.num_splits * num_groups) {
        return;
    }
    let item = index / num_groups;
    let head = (index - item * num_groups) * {{ HEADS }}u;
    let sequence = splits[item].x;
    let context_len = context_lens[sequence];
    // A split before the window leaves nothing, which weighs nothing in the merge.
    let first = max(splits[item].y * SPLIT, first_token(context_len - 1u));
    let last = min(splits[item].y * SPLIT + SPLIT, context_len);
    let kv_head = head / (params.num_heads / params.num_kv_heads);
    let table_base = sequence * params.block_table_stride;
    begin((sequence * params.num_heads + head) * HEAD_DIM4);
    for (var token = first; token < last; token++) {
        fold(row_of(table_base, token, kv_head), true, 0u);
    }
    let target_base = (item * params.num_heads + head) * (HEAD_DIM4 + 1u);
    {% for h in range(HEADS) %}
    {% for i in range(HEAD_DIM // 4) %}
    partials[target_base + {{ h }}u * (HEAD_DIM4 + 1u) + {{ i }}u] = acc{{ h }}_{{ i }};
    {% endfor %}
    partials[target_base + {{ h }}u * (HEAD_DIM4 + 1u) + HEAD_DIM4] = vec4<f32>(score_max{{ h }}, weight_sum{{ h }}, 0.0, 0.0);
    {% endfor %}
}
{% endif %}
