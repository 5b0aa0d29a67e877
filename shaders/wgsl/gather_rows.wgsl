// output[i, :] = input[rows[i], :]: the rows of a step whose logits are wanted.

struct Params {
    width4: u32,       // columns / 4
    pad0: u32,
    pad1: u32,
    pad2: u32,
}

@group(0) @binding(0) var<storage, read> input: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> rows: array<u32>;
@group(0) @binding(2) var<storage, read_write> output: array<vec4<f32>>;
@group(0) @binding(3) var<uniform> params: Params;

@compute @workgroup_size({{ WORKGROUP_SIZE }})
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if (id.x >= params.width4) {
        return;
    }
    output[id.y * params.width4 + id.x] = input[rows[id.y] * params.width4 + id.x];
}
