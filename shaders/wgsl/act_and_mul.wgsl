// output = activation(gate) * up, over vec4 groups; a row of gate_up holds the gate's values, then up's.
//
// silu(x) = x / (1 + exp(-x)). gelu is its tanh form: (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)), with
// u = sqrt(2 / pi) * (x + 0.044715 x^3).

struct Params {
    count4: u32,       // values of the output / 4
    width4: u32,       // values of an output row / 4
    row_width: u32,    // invocations a grid row, since a grid dimension is bounded
    pad0: u32,
}

@group(0) @binding(0) var<storage, read> gate_up: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read_write> output: array<vec4<f32>>;
@group(0) @binding(2) var<uniform> params: Params;

fn activated(x: vec4<f32>) -> vec4<f32> {
    {% if ACTIVATION == "gelu" %}
    let u = 0.7978845608 * x * fma(0.044715 * x, x, vec4<f32>(1.0));
    return x / (vec4<f32>(1.0) + exp(-2.0 * u));
    {% else %}
    return x / (vec4<f32>(1.0) + exp(-x));
    {% endif %}
}

@compute @workgroup_size({{ WORKGROUP_SIZE }})
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let i = id.y * params.row_width + id.x;
    if (id.x >= params.row_width || i >= params.count4) {
        return;
    }
    let row = i / params.width4;
    let gate = row * params.width4 + i;
    output[i] = activated(gate_up[gate]) * gate_up[gate + params.width4];
}
