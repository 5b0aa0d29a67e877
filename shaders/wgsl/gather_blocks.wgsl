// Copies whole KV blocks of one layer out of the paged cache into their canonical order.
//
// Device layout of one layer's cache: [block, kv_head, offset, head_dim]; canonical: [layer, K then V, kv_head, offset,
// head_dim] for each block (scales of bytes behind each head's rows), so that a block's part of one layer is contiguous in both. One invocation copies one
// vec4<u32> of K and of V.

struct Params {
    block_words4: u32,  // vec4<u32> of one block in one layer's K (or V)
    layer: u32,
    num_layers: u32,
    pad: u32,
}

@group(0) @binding(0) var<storage, read> key_cache: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> value_cache: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> block_ids: array<u32>;
@group(0) @binding(3) var<storage, read_write> payloads: array<vec4<u32>>;
@group(0) @binding(4) var<uniform> params: Params;

@compute @workgroup_size({{ WORKGROUP_SIZE }})
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if (id.x >= params.block_words4) {
        return;
    }
    let source = block_ids[id.y] * params.block_words4 + id.x;
    let target_index = (id.y * params.num_layers + params.layer) * 2u * params.block_words4 + id.x;
    payloads[target_index] = key_cache[source];
    payloads[target_index + params.block_words4] = value_cache[source];
}
