// Causal attention of a chunk of query tokens over cached and new blocks (the chunk's own K and V are cached first).
//
// One workgroup handles QUERY_TILE query tokens of one sequence for HEADS heads of one KV head, a query a lane, without a
// barrier: all lanes read the same cached token at a time. Every query folds the tokens in one order, from the first that it sees to
// its own position, whatever chunk it came in. tiles[i] = (sequence, first query of the tile within the sequence's chunk).

struct Params {
    num_heads: u32,
    num_kv_heads: u32,
    block_table_stride: u32,
    scale: f32,
    soft_cap: f32,     // 0 leaves scores
    window: u32,       // tokens that a query sees; 0 for all
    pad0: u32,
    pad1: u32,
}

@group(0) @binding(0) var<storage, read> query: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> key_cache: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> value_cache: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> block_tables: array<u32>;
// (first row of the chunk in `query`, query_len, context_len including the chunk, unused), by sequence
@group(0) @binding(4) var<storage, read> chunks: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read> tiles: array<vec2<u32>>;
@group(0) @binding(6) var<storage, read_write> output: array<vec4<f32>>;
@group(0) @binding(7) var<uniform> params: Params;

const BLOCK_SIZE: u32 = {{ BLOCK_SIZE }}u;
const QUERY_TILE: u32 = {{ QUERY_TILE }}u;
const HEAD_DIM4: u32 = {{ HEAD_DIM // 4 }}u;
const LOWEST: f32 = -3.0e38;

{% include "attend.wgsl" %}

@compute @workgroup_size(QUERY_TILE)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let tile = tiles[workgroup.x];
    let head = workgroup.y * {{ HEADS }}u;
    let chunk = chunks[tile.x];
    let query_index = tile.y + lane;
    let active_query = query_index < chunk.y;
    let row = chunk.x + min(query_index, chunk.y - 1u);
    let position = chunk.z - chunk.y + query_index;
    let tile_end = min(chunk.z, chunk.z - chunk.y + tile.y + QUERY_TILE);
    let kv_head = head / (params.num_heads / params.num_kv_heads);
    let table_base = tile.x * params.block_table_stride;
    begin((row * params.num_heads + head) * HEAD_DIM4);
    let first = first_token(position);
    // Tokens before the first query's window are seen by none of the tile.
    for (var token = first_token(chunk.z - chunk.y + tile.y); token < tile_end; token++) {
        fold(row_of(table_base, token, kv_head), token <= position && token >= first, lane);
    }
    if (active_query) {
        let target_base = (row * params.num_heads + head) * HEAD_DIM4;
        {% for h in range(HEADS) %}
        {% for i in range(HEAD_DIM // 4) %}
        output[target_base + {{ h * HEAD_DIM // 4 + i }}u] = acc{{ h }}_{{ i }} / weight_sum{{ h }};
        {% endfor %}
        {% endfor %}
    }
}
