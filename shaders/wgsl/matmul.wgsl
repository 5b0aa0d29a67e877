// output[token, row] = sum over k of weight[row, k] * input[token, k], or += where params.accumulate is 1.
//
// One invocation computes ROWS rows of TOKENS tokens in f32. A decode step uses the variant of one token (a matrix-vector
// product), a prefill the one of several, which unpacks each weight once for all of them. The order in which an element
// is summed is the same in both: four running sums by k mod 4, blocks in order.

struct Params {
    num_rows: u32,       // rows of this shard
    row_start: u32,      // first output column of this shard
    num_blocks: u32,     // blocks of 32 along k
    num_tokens: u32,
    output_stride: u32,  // columns of a whole output row
    accumulate: u32,
    pad0: u32,
    pad1: u32,
}

@group(0) @binding(2) var<storage, read> input: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> output: array<f32>;
@group(0) @binding(4) var<uniform> params: Params;

const WORKGROUP_SIZE: u32 = {{ WORKGROUP_SIZE }}u;

{% include "dequantize.wgsl" %}

fn store(token: u32, row: u32, sums: vec4<f32>) {
    if (token >= params.num_tokens || row >= params.num_rows) {
        return;
    }
    let index = token * params.output_stride + params.row_start + row;
    var value = (sums.x + sums.y) + (sums.z + sums.w);
    if (params.accumulate == 1u) {
        value += output[index];
    }
    output[index] = value;
}

@compute @workgroup_size(WORKGROUP_SIZE)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    {% for r in range(ROWS) %}
    let row{{ r }} = workgroup.x * {{ WORKGROUP_SIZE * ROWS }}u + {{ WORKGROUP_SIZE * r }}u + lane;
    let column{{ r }} = min(row{{ r }}, params.num_rows - 1u);
    {% endfor %}
    {% for t in range(TOKENS) %}
    let token{{ t }} = workgroup.y * {{ TOKENS }}u + {{ t }}u;
    let base{{ t }} = min(token{{ t }}, params.num_tokens - 1u) * params.num_blocks * 8u;
    {% for r in range(ROWS) %}
    var sum_{{ r }}_{{ t }} = vec4<f32>(0.0);
    {% endfor %}
    {% endfor %}
    for (var block = 0u; block < params.num_blocks; block++) {
        {% for r in range(ROWS) %}
        let w{{ r }} = weight_block(block, column{{ r }});
        {% endfor %}
        {% for t in range(TOKENS) %}
        {% for i in range(8) %}
        {
            let x = input[base{{ t }} + block * 8u + {{ i }}u];
            {% for r in range(ROWS) %}
            sum_{{ r }}_{{ t }} = fma(w{{ r }}[{{ i }}], x, sum_{{ r }}_{{ t }});
            {% endfor %}
        }
        {% endfor %}
        {% endfor %}
    }
    {% for t in range(TOKENS) %}
    {% for r in range(ROWS) %}
    store(token{{ t }}, row{{ r }}, sum_{{ r }}_{{ t }});
    {% endfor %}
    {% endfor %}
    {% if FORMAT in ["f32", "f16", "bf16"] %}
    keep_scales();
    {% endif %}
}
