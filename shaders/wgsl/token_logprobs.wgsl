// (logit of the row's token, log of the sum of exponentials, rank of the token): the log probability is the first less the
// second, for this token and for any other whose logit is known.
//
// One workgroup a row, sums in a fixed order. A token that is none (argmax saw a NaN) gives zeros.

struct Params {
    width: u32,
    pad0: u32,
    pad1: u32,
    pad2: u32,
}

@group(0) @binding(0) var<storage, read> logits: array<f32>;
@group(0) @binding(1) var<storage, read> tokens: array<u32>;
@group(0) @binding(2) var<storage, read_write> logprobs: array<vec4<u32>>;
@group(0) @binding(3) var<uniform> params: Params;

const WORKGROUP_SIZE: u32 = {{ WORKGROUP_SIZE }}u;
var<workgroup> values: array<f32, WORKGROUP_SIZE>;
var<workgroup> counts: array<u32, WORKGROUP_SIZE>;
var<workgroup> shared_value: f32;

@compute @workgroup_size(WORKGROUP_SIZE)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = workgroup.x;
    let token = tokens[row];
    if (token >= params.width) {
        if (lane == 0u) {
            logprobs[row] = vec4<u32>(0u);
        }
        return;
    }
    let base = row * params.width;
    let logit = logits[base + token];
    var largest = logit;
    var above = 0u;
    for (var i = lane; i < params.width; i += WORKGROUP_SIZE) {
        let x = logits[base + i];
        largest = max(largest, x);
        above += select(0u, 1u, x > logit);
    }
    values[lane] = largest;
    counts[lane] = above;
    workgroupBarrier();
    for (var stride = WORKGROUP_SIZE / 2u; stride > 0u; stride >>= 1u) {
        if (lane < stride) {
            values[lane] = max(values[lane], values[lane + stride]);
            counts[lane] += counts[lane + stride];
        }
        workgroupBarrier();
    }
    if (lane == 0u) {
        shared_value = values[0];
    }
    largest = workgroupUniformLoad(&shared_value);
    var sum = 0.0;
    for (var i = lane; i < params.width; i += WORKGROUP_SIZE) {
        sum += exp(logits[base + i] - largest);
    }
    values[lane] = sum;
    workgroupBarrier();
    for (var stride = WORKGROUP_SIZE / 2u; stride > 0u; stride >>= 1u) {
        if (lane < stride) {
            values[lane] += values[lane + stride];
        }
        workgroupBarrier();
    }
    if (lane == 0u) {
        let log_sum = largest + log(values[0]);
        logprobs[row] = vec4<u32>(bitcast<u32>(logit), bitcast<u32>(log_sum), counts[0] + 1u, 0u);
    }
}
