// Writes the new keys and values of a step into their slots of the paged cache, as f16 packed in pairs.
//
// slot = block_id * BLOCK_SIZE + offset. Device layout of one layer's cache: [block, kv_head, offset, head_dim].
// One invocation writes eight values (one vec4<u32>) of one head of one token, of both K and V.

struct Params {
    num_kv_heads: u32,
    head_dim8: u32,    // head_dim / 8
    pad0: u32,
    pad1: u32,
}

@group(0) @binding(0) var<storage, read> key: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> value: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> slot_mapping: array<u32>;
@group(0) @binding(3) var<storage, read_write> key_cache: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read_write> value_cache: array<vec4<u32>>;
@group(0) @binding(5) var<uniform> params: Params;

const BLOCK_SIZE: u32 = {{ BLOCK_SIZE }}u;

fn pack(low: vec4<f32>, high: vec4<f32>) -> vec4<u32> {
    return vec4<u32>(pack2x16float(low.xy), pack2x16float(low.zw), pack2x16float(high.xy), pack2x16float(high.zw));
}

@compute @workgroup_size({{ WORKGROUP_SIZE }})
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let token = id.y;
    if (id.x >= params.num_kv_heads * params.head_dim8) {
        return;
    }
    let head = id.x / params.head_dim8;
    let part = id.x - head * params.head_dim8;
    let slot = slot_mapping[token];
    let block_id = slot / BLOCK_SIZE;
    let offset = slot - block_id * BLOCK_SIZE;
    let source = (token * params.num_kv_heads * params.head_dim8 + id.x) * 2u;
    let target_index = ((block_id * params.num_kv_heads + head) * BLOCK_SIZE + offset) * params.head_dim8 + part;
    key_cache[target_index] = pack(key[source], key[source + 1u]);
    value_cache[target_index] = pack(value[source], value[source + 1u]);
}
