// output[token, row] = sum over k of weight[row, k] * input[token, k], or += where params.accumulate is 1.
//
// One invocation computes ROWS rows of TOKENS tokens in f32. A decode step uses the variant of one token (a matrix-vector
// product), others the one of several, which unpacks each weight once for all of them. With SLICES, a workgroup has a tile of
// 32 rows, and each 32 of its lanes every SLICES-th block of them. The order in which an element is summed is the same for one
// token and for several: four running sums by k mod 4, blocks of a slice in order, then the slices.

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

{% if SLICES > 1 %}
var<workgroup> partials: array<f32, {{ 32 * SLICES * TOKENS }}>;
{% endif %}

{% include "store.wgsl" %}

@compute @workgroup_size(WORKGROUP_SIZE)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    {% for r in range(ROWS) %}
    {% if SLICES > 1 %}
    let row0 = workgroup.x * 32u + lane % 32u;
    {% else %}
    let row{{ r }} = workgroup.x * {{ WORKGROUP_SIZE * ROWS }}u + {{ WORKGROUP_SIZE * r }}u + lane;
    {% endif %}
    let column{{ r }} = min(row{{ r }}, params.num_rows - 1u);
    {% endfor %}
    {% for t in range(TOKENS) %}
    let token{{ t }} = workgroup.y * {{ TOKENS }}u + {{ t }}u;
    let base{{ t }} = min(token{{ t }}, params.num_tokens - 1u) * params.num_blocks * 8u;
    {% for r in range(ROWS) %}
    var sum_{{ r }}_{{ t }} = vec4<f32>(0.0);
    {% endfor %}
    {% endfor %}
    for (var block = {{ "lane / 32u" if SLICES > 1 else "0u" }}; block < params.num_blocks; block += {{ SLICES }}u) {
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
    {% if SLICES > 1 %}
    // [token][slice][row]
    {% for t in range(TOKENS) %}
    partials[{{ t * SLICES * 32 }}u + lane] = (sum_0_{{ t }}.x + sum_0_{{ t }}.y) + (sum_0_{{ t }}.z + sum_0_{{ t }}.w);
    {% endfor %}
    workgroupBarrier();
    for (var i = lane; i < {{ 32 * TOKENS }}u; i += WORKGROUP_SIZE) {
        var sum = 0.0;
        for (var slice = 0u; slice < {{ SLICES }}u; slice++) {
            sum += partials[((i / 32u) * {{ SLICES }}u + slice) * 32u + i % 32u];
        }
        store(token0 + i / 32u, workgroup.x * 32u + i % 32u, sum);
    }
    {% else %}
    {% for t in range(TOKENS) %}
    {% for r in range(ROWS) %}
    {% set sum = "sum_" ~ r ~ "_" ~ t %}
    store(token{{ t }}, row{{ r }}, ({{ sum }}.x + {{ sum }}.y) + ({{ sum }}.z + {{ sum }}.w));
    {% endfor %}
    {% endfor %}
    {% endif %}
    {% if FORMAT in ["f32", "f16", "bf16"] %}
    keep_scales();
    {% endif %}
}
