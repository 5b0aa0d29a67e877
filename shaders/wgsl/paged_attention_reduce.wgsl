// Merges the partial results of paged_attention_decode: one invocation per sequence, head and four dimensions; with QUANTIZE
// 32 dimensions, which are rounded to int8 beside, as quantize_activations does it.
//
// split_starts[s]..split_starts[s + 1] are the work items of sequence s, in order.

struct Params {
    num_heads: u32,
    pad0: u32,
    pad1: u32,
    pad2: u32,
}

@group(0) @binding(0) var<storage, read> partials: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> split_starts: array<u32>;
@group(0) @binding(2) var<storage, read_write> output: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> codes: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read_write> block_scales: array<vec2<f32>>;
@group(0) @binding(5) var<uniform> params: Params;

const HEAD_DIM4: u32 = {{ HEAD_DIM // 4 }}u;
// vec4 groups of an invocation.
const PART: u32 = {{ 8 if QUANTIZE == 1 else 1 }}u;
const LOWEST: f32 = -3.0e38;

{% if QUANTIZE == 1 %}
{% include "quantize.wgsl" %}
{% endif %}

@compute @workgroup_size({{ WORKGROUP_SIZE }})
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let sequence = id.y;
    let group = id.x * PART;
    if (group >= params.num_heads * HEAD_DIM4) {
        return;
    }
    let head = group / HEAD_DIM4;
    let part = group - head * HEAD_DIM4;
    let first = split_starts[sequence];
    let last = split_starts[sequence + 1u];
    var score_max = LOWEST;
    for (var item = first; item < last; item++) {
        score_max = max(score_max, partials[(item * params.num_heads + head) * (HEAD_DIM4 + 1u) + HEAD_DIM4].x);
    }
    var weight_sum = 0.0;
    {% for i in range(8 if QUANTIZE == 1 else 1) %}
    var acc{{ i }} = vec4<f32>(0.0);
    {% endfor %}
    for (var item = first; item < last; item++) {
        let base = (item * params.num_heads + head) * (HEAD_DIM4 + 1u);
        let state = partials[base + HEAD_DIM4];
        let shrink = exp(state.x - score_max);
        weight_sum = fma(state.y, shrink, weight_sum);
        {% for i in range(8 if QUANTIZE == 1 else 1) %}
        acc{{ i }} = fma(partials[base + part + {{ i }}u], vec4<f32>(shrink), acc{{ i }});
        {% endfor %}
    }
    let target_base = sequence * params.num_heads * HEAD_DIM4 + group;
    {% if QUANTIZE == 1 %}
    var values: array<vec4<f32>, 8>;
    {% for i in range(8) %}
    values[{{ i }}] = acc{{ i }} / weight_sum;
    output[target_base + {{ i }}u] = values[{{ i }}];
    {% endfor %}
    quantize(target_base / 8u, values);
    {% else %}
    output[target_base] = acc0 / weight_sum;
    _ = &codes;
    _ = &block_scales;
    {% endif %}
}
