// output[token, row] (+)= sum over k of weight[row, k] * input[token, k], over activations that quantize_activations rounded to int8:
// a block of 32 is eight dot4I8Packed.
//
// With SHARE a workgroup is one subgroup of eight lanes, which load a block's activations together: for software adapters,
// where every lane's load is a load. The integer sum of a block is exact; the f32 sum over blocks runs in block order, the same for one token or several.

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

{% if SHARE == 1 %}
@group(0) @binding(2) var<storage, read> codes: array<u32>;
{% else %}
@group(0) @binding(2) var<storage, read> codes: array<vec4<u32>>;
{% endif %}
@group(0) @binding(3) var<storage, read> block_scales: array<vec2<f32>>;
@group(0) @binding(4) var<storage, read_write> output: array<f32>;
@group(0) @binding(5) var<uniform> params: Params;

const WORKGROUP_SIZE: u32 = {{ WORKGROUP_SIZE }}u;

{% include "weights.wgsl" %}

{% if FORMAT == "q6k" %}
// Codes 0 to 63, less 32, as signed bytes: no borrow passes from one to the next.
fn less_32(codes: vec4<u32>) -> vec4<u32> {
    return ((codes | vec4<u32>(0x80808080u)) - vec4<u32>(0x20202020u)) ^ vec4<u32>(0x80808080u);
}
{% endif %}

fn dot16(a: vec4<u32>, b: vec4<u32>) -> i32 {
    return dot4I8Packed(a.x, b.x) + dot4I8Packed(a.y, b.y) + dot4I8Packed(a.z, b.z) + dot4I8Packed(a.w, b.w);
}

{% include "store.wgsl" %}

@compute @workgroup_size(WORKGROUP_SIZE)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    {% for r in range(ROWS) %}
    let row{{ r }} = workgroup.x * {{ WORKGROUP_SIZE * ROWS }}u + {{ WORKGROUP_SIZE * r }}u + lane;
    let column{{ r }} = min(row{{ r }}, params.num_rows - 1u);
    let start{{ r }} = block_index(0u, column{{ r }});
    let width{{ r }} = block_index(1u, column{{ r }}) - start{{ r }};
    {% endfor %}
    {% for t in range(TOKENS) %}
    let token{{ t }} = workgroup.y * {{ TOKENS }}u + {{ t }}u;
    let base{{ t }} = min(token{{ t }}, params.num_tokens - 1u) * params.num_blocks;
    {% for r in range(ROWS) %}
    var sum_{{ r }}_{{ t }} = 0.0;
    {% endfor %}
    {% endfor %}
    {% if FORMAT in ["q4k", "q5k", "q6k"] %}
    {% for r in range(ROWS) %}
    var units{{ r }} = vec2<f32>(0.0);
    {% endfor %}
    {% endif %}
    for (var block = 0u; block < params.num_blocks; block++) {
        {% if FORMAT in ["q4k", "q5k", "q6k"] %}
        if ((block & 7u) == 0u) {
            {% for r in range(ROWS) %}
            units{{ r }} = units_of(block, column{{ r }});
            {% endfor %}
        }
        {% endif %}
        {% for r in range(ROWS) %}
        let index{{ r }} = start{{ r }} + block * width{{ r }};
        {% if FORMAT in ["q4k", "q5k"] %}
        let scale{{ r }} = scale_bytes(scale_word(index{{ r }}, 0u)) * units{{ r }};
        {% elif FORMAT == "q6k" %}
        let scale{{ r }} = scale_bytes(scale_word(index{{ r }}, 0u)) * units{{ r }}.x;
        {% else %}
        let scale{{ r }} = unpack2x16float(scale_word(index{{ r }}, 0u));
        {% endif %}
        {% if FORMAT != "q8" %}
        let packed{{ r }} = codes_at(index{{ r }});
        {% endif %}
        {% if FORMAT in ["q4", "q4k"] %}
        let low{{ r }} = packed{{ r }} & vec4<u32>(0x0f0f0f0fu);
        let high{{ r }} = (packed{{ r }} >> vec4<u32>(4u)) & vec4<u32>(0x0f0f0f0fu);
        {% elif FORMAT in ["q5", "q5k"] %}
        let fifth{{ r }} = scale_word(index{{ r }}, 1u);
        let low{{ r }} = (packed{{ r }} & vec4<u32>(0x0f0f0f0fu)) | fifth_bits(fifth{{ r }}, 0u);
        let high{{ r }} = ((packed{{ r }} >> vec4<u32>(4u)) & vec4<u32>(0x0f0f0f0fu)) | fifth_bits(fifth{{ r }}, 4u);
        {% elif FORMAT == "q6k" %}
        let low{{ r }} = less_32((packed{{ r }} & vec4<u32>(0x0f0f0f0fu)) | upper_pairs(scale_word(index{{ r }}, 1u)));
        let high{{ r }} = less_32(((packed{{ r }} >> vec4<u32>(4u)) & vec4<u32>(0x0f0f0f0fu)) | upper_pairs(scale_word(index{{ r }}, 2u)));
        {% else %}
        let low{{ r }} = codes_at(index{{ r }} * 2u);
        let high{{ r }} = codes_at(index{{ r }} * 2u + 1u);
        {% endif %}
        {% endfor %}
        {% for t in range(TOKENS) %}
        {
            {% if SHARE == 1 %}
            // Each lane loads a word of the block, and all have all eight.
            let mine = codes[(base{{ t }} + block) * 8u + lane];
            let x_low = vec4<u32>({% for i in range(4) %}subgroupBroadcast(mine, {{ i }}u){{ ", " if not loop.last }}{% endfor %});
            let x_high = vec4<u32>({% for i in range(4, 8) %}subgroupBroadcast(mine, {{ i }}u){{ ", " if not loop.last }}{% endfor %});
            {% else %}
            let x_low = codes[(base{{ t }} + block) * 2u];
            let x_high = codes[(base{{ t }} + block) * 2u + 1u];
            {% endif %}
            let x_scale = block_scales[base{{ t }} + block];
            {% for r in range(ROWS) %}
            {
                {% if FORMAT == "q6k" %}
                let product = scale{{ r }}.x * f32(dot16(low{{ r }}, x_low));
                let both = fma(scale{{ r }}.y, f32(dot16(high{{ r }}, x_high)), product);
                sum_{{ r }}_{{ t }} = fma(x_scale.x, both, sum_{{ r }}_{{ t }});
                {% else %}
                let product = f32(dot16(low{{ r }}, x_low) + dot16(high{{ r }}, x_high));
                sum_{{ r }}_{{ t }} = fma(scale{{ r }}.x * x_scale.x, product, sum_{{ r }}_{{ t }});
                {% endif %}
                {% if FORMAT not in ["q8", "q6k"] %}
                sum_{{ r }}_{{ t }} = fma(scale{{ r }}.y, x_scale.y, sum_{{ r }}_{{ t }});
                {% endif %}
            }
            {% endfor %}
        }
        {% endfor %}
    }
    {% for t in range(TOKENS) %}
    {% for r in range(ROWS) %}
    store(token{{ t }}, row{{ r }}, sum_{{ r }}_{{ t }});
    {% endfor %}
    {% endfor %}
}
