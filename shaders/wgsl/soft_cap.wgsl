// values = cap * tanh(values / cap), elementwise, in place; tanh(y) = 1 - 2 / (exp(2y) + 1), which is right at both ends.

struct Params {
    count: u32,
    row_width: u32,    // invocations a grid row, since a grid dimension is bounded
    cap: f32,
    pad0: u32,
}

@group(0) @binding(0) var<storage, read_write> values: array<f32>;
@group(0) @binding(1) var<uniform> params: Params;

@compute @workgroup_size({{ WORKGROUP_SIZE }})
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let i = id.y * params.row_width + id.x;
    if (id.x >= params.row_width || i >= params.count) {
        return;
    }
    values[i] = params.cap * (1.0 - 2.0 / (exp(2.0 * values[i] / params.cap) + 1.0));
}
