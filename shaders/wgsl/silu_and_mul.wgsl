// gate = silu(gate) * up, elementwise over vec4 groups, in place; silu(x) = x / (1 + exp(-x)).

struct Params {
    count4: u32,       // values / 4
    row_width: u32,    // invocations a grid row, since a grid dimension is bounded
    pad0: u32,
    pad1: u32,
}

@group(0) @binding(0) var<storage, read_write> gate: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> up: array<vec4<f32>>;
@group(0) @binding(2) var<uniform> params: Params;

@compute @workgroup_size({{ WORKGROUP_SIZE }})
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let i = id.y * params.row_width + id.x;
    if (id.x >= params.row_width || i >= params.count4) {
        return;
    }
    let x = gate[i];
    gate[i] = x / (vec4<f32>(1.0) + exp(-x)) * up[i];
}
