// output = activation(gate) * up; a row of gate_up holds the gate's values, then up's. With QUANTIZE the output is rounded
// to int8 in blocks of 32 beside, as quantize_activations does it.
//
// One invocation a block of 32 values. silu(x) = x / (1 + exp(-x)). gelu is its tanh form: (1 + tanh(u)) / 2 =
// 1 / (1 + exp(-2u)), with u = sqrt(2 / pi) * (x + 0.044715 x^3).

struct Params {
    num_blocks: u32,     // blocks of 32 in all rows of the output
    width_blocks: u32,   // blocks of an output row
    row_width: u32,      // invocations a grid row, since a grid dimension is bounded
    pad0: u32,
}

@group(0) @binding(0) var<storage, read> gate_up: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read_write> output: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> codes: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> block_scales: array<vec2<f32>>;
@group(0) @binding(4) var<uniform> params: Params;

{% if QUANTIZE == 1 %}
{% include "quantize.wgsl" %}
{% endif %}

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
    let block = id.y * params.row_width + id.x;
    if (id.x >= params.row_width || block >= params.num_blocks) {
        return;
    }
    // Rows of gate_up are twice as wide.
    let gate = (block + (block / params.width_blocks) * params.width_blocks) * 8u;
    let up = gate + params.width_blocks * 8u;
    var values: array<vec4<f32>, 8>;
    {% for i in range(8) %}
    values[{{ i }}] = activated(gate_up[gate + {{ i }}u]) * gate_up[up + {{ i }}u];
    output[block * 8u + {{ i }}u] = values[{{ i }}];
    {% endfor %}
    {% if QUANTIZE == 1 %}
    quantize(block, values);
    {% else %}
    _ = &codes;
    _ = &block_scales;
    {% endif %}
}
