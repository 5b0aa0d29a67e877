// output[row, :] = input[row, :] / sqrt(mean(input[row, :]^2) + epsilon) * weight, or += where params.accumulate is 1; with
// QUANTIZE the output is rounded to int8 in blocks of 32 beside, as quantize_activations does it.
//
// One workgroup a row. Each lane sums its own stride of vec4 groups, then the lanes are added up.

struct Params {
    width4: u32,       // columns / 4
    epsilon: f32,
    accumulate: u32,
    pad0: u32,
}

@group(0) @binding(0) var<storage, read> input: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> weight: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> output: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> codes: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read_write> block_scales: array<vec2<f32>>;
@group(0) @binding(5) var<uniform> params: Params;

const WORKGROUP_SIZE: u32 = {{ WORKGROUP_SIZE }}u;

{% include "sum.wgsl" %}

{% if QUANTIZE == 1 %}
{% include "quantize.wgsl" %}
{% endif %}

@compute @workgroup_size(WORKGROUP_SIZE)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
    {% if SUM == "subgroups" %}
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
    @builtin(num_subgroups) num_subgroups: u32,
    {% endif %}
) {
    let base = workgroup.x * params.width4;
    var sum = vec4<f32>(0.0);
    for (var i = lane; i < params.width4; i += WORKGROUP_SIZE) {
        let x = input[base + i];
        sum = fma(x, x, sum);
    }
    let squares = sum_of_all((sum.x + sum.y) + (sum.z + sum.w), {% if SUM == "subgroups" %}Place(subgroup, subgroup_lane, num_subgroups){% else %}lane{% endif %});
    let mean = squares / f32(params.width4 * 4u);
    let scale = 1.0 / sqrt(mean + params.epsilon);
    {% if QUANTIZE == 1 %}
    for (var block = lane; block < params.width4 / 8u; block += WORKGROUP_SIZE) {
        var values: array<vec4<f32>, 8>;
        {% for i in range(8) %}
        values[{{ i }}] = input[base + block * 8u + {{ i }}u] * scale * weight[block * 8u + {{ i }}u];
        output[base + block * 8u + {{ i }}u] = values[{{ i }}];
        {% endfor %}
        quantize(base / 8u + block, values);
    }
    {% else %}
    for (var i = lane; i < params.width4; i += WORKGROUP_SIZE) {
        let value = input[base + i] * scale * weight[i];
        output[base + i] = select(value, output[base + i] + value, params.accumulate == 1u);
    }
    _ = &codes;
    _ = &block_scales;
    {% endif %}
}
