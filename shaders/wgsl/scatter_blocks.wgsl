// Copies whole KV blocks of one layer from their canonical order into the paged cache: the way back of gather_blocks.
//
// Canonical: [layer, K then V, kv_head, offset, head_dim] for each block; device layout of one layer's cache: [block, kv_head,
// offset, head_dim]. No block id comes twice. One invocation copies one vec4<u32> of K and of V.

struct Params {
    block_words4: u32,  // vec4<u32> of one block in one layer's K (or V)
    layer: u32,
    num_layers: u32,
    pad: u32,
}

@group(0) @binding(0) var<storage, read> payloads: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> block_ids: array<u32>;
@group(0) @binding(2) var<storage, read_write> key_cache: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> value_cache: array<vec4<u32>>;
@group(0) @binding(4) var<uniform> params: Params;

@compute @workgroup_size({{ WORKGROUP_SIZE }})
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if (id.x >= params.block_words4) {
        return;
    }
    let source = (id.y * params.num_layers + params.layer) * 2u * params.block_words4 + id.x;
    let target_index = block_ids[id.y] * params.block_words4 + id.x;
    key_cache[target_index] = payloads[source];
    value_cache[target_index] = payloads[source + params.block_words4];
}
