// values[row, :] += bias, elementwise over vec4 groups, in place.

struct Params {
    count4: u32,       // values / 4
    width4: u32,       // values of a row / 4
    row_width: u32,    // invocations a grid row, since a grid dimension is bounded
    pad0: u32,
}

@group(0) @binding(0) var<storage, read> bias: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read_write> values: array<vec4<f32>>;
@group(0) @binding(2) var<uniform> params: Params;

@compute @workgroup_size({{ WORKGROUP_SIZE }})
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let i = id.y * params.row_width + id.x;
    if (id.x >= params.row_width || i >= params.count4) {
        return;
    }
    values[i] += bias[i % params.width4];
}
