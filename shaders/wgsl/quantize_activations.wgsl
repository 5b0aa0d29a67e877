// Rounds activations to signed bytes in blocks of 32, one invocation a block.

struct Params {
    num_blocks: u32,   // blocks in all rows
    row_width: u32,    // invocations a grid row, since a grid dimension is bounded
    pad0: u32,
    pad1: u32,
}

@group(0) @binding(0) var<storage, read> input: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read_write> codes: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read_write> block_scales: array<vec2<f32>>;
@group(0) @binding(3) var<uniform> params: Params;

{% include "quantize.wgsl" %}

@compute @workgroup_size({{ WORKGROUP_SIZE }})
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let block = id.y * params.row_width + id.x;
    if (id.x >= params.row_width || block >= params.num_blocks) {
        return;
    }
    quantize(block, array<vec4<f32>, 8>(
        {% for i in range(8) %}
        input[block * 8u + {{ i }}u],
        {% endfor %}
    ));
}
