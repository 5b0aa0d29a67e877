// Merges the partial results of paged_attention_decode: one invocation per (sequence, head, four dimensions).
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
@group(0) @binding(3) var<uniform> params: Params;

const HEAD_DIM4: u32 = {{ HEAD_DIM // 4 }}u;
const LOWEST: f32 = -3.0e38;

@compute @workgroup_size({{ WORKGROUP_SIZE }})
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let sequence = id.y;
    if (id.x >= params.num_heads * HEAD_DIM4) {
        return;
    }
    let head = id.x / HEAD_DIM4;
    let part = id.x - head * HEAD_DIM4;
    let first = split_starts[sequence];
    let last = split_starts[sequence + 1u];
    var score_max = LOWEST;
    for (var item = first; item < last; item++) {
        score_max = max(score_max, partials[(item * params.num_heads + head) * (HEAD_DIM4 + 1u) + HEAD_DIM4].x);
    }
    var weight_sum = 0.0;
    var acc = vec4<f32>(0.0);
    for (var item = first; item < last; item++) {
        let base = (item * params.num_heads + head) * (HEAD_DIM4 + 1u);
        let state = partials[base + HEAD_DIM4];
        let shrink = exp(state.x - score_max);
        weight_sum = fma(state.y, shrink, weight_sum);
        acc = fma(partials[base + part], vec4<f32>(shrink), acc);
    }
    output[sequence * params.num_heads * HEAD_DIM4 + id.x] = acc / weight_sum;
}
