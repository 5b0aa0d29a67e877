// output[token, :] = table[token_ids[token], :] * scale, dequantised.
//
// One invocation copies one block of 32 columns of one token. A table over the binding limit is split by rows into
// shards of one dispatch each: an invocation whose token id lies in another shard writes nothing.

struct Params {
    num_rows: u32,     // rows of this shard
    row_start: u32,    // first table row of this shard
    num_blocks: u32,   // blocks of 32 columns
    scale: f32,
}

@group(0) @binding(2) var<storage, read> token_ids: array<u32>;
@group(0) @binding(3) var<storage, read_write> output: array<vec4<f32>>;
@group(0) @binding(4) var<uniform> params: Params;

{% include "dequantize.wgsl" %}

@compute @workgroup_size({{ WORKGROUP_SIZE }})
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let block = id.x;
    let token = id.y;
    if (block >= params.num_blocks) {
        return;
    }
    let row = token_ids[token] - params.row_start;
    if (row >= params.num_rows) {
        return;
    }
    let values = weight_block(block, row);
    let base = (token * params.num_blocks + block) * 8u;
    {% for i in range(8) %}
    output[base + {{ i }}u] = values[{{ i }}] * params.scale;
    {% endfor %}
    {% if FORMAT in ["f32", "f16", "bf16"] %}
    keep_scales();
    {% endif %}
}
