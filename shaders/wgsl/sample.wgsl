// One token a row: the largest logit, a given one, or a draw from what min-p, top-k and top-p leave.
//
// One workgroup a row. Logits are turned into weights exp((logit - largest) / temperature) in place; a truncation is a
// bound on the weights, found bit by bit from above (positive floats are ordered as their bits are), so ties stay or go
// together. The draw walks the weights in the order of their indices. All sums run in a fixed order. A NaN is told of by
// argmax, whose index is then no token.

struct Params {
    width: u32,
    pad0: u32,
    pad1: u32,
    pad2: u32,
}

struct Draw {
    kind: u32,             // 0 the largest, 1 a draw, 2 the given token
    token: u32,            // of kind 2
    inverse_temperature: f32,
    top_k: u32,            // 0 is all
    top_p: f32,            // 1 is all
    min_p: f32,            // 0 is all
    uniform: f32,          // in [0, 1)
    pad: u32,
}

@group(0) @binding(0) var<storage, read_write> scores: array<f32>;
@group(0) @binding(1) var<storage, read> best: array<vec2<u32>>;
@group(0) @binding(2) var<storage, read> draws: array<Draw>;
@group(0) @binding(3) var<storage, read_write> chosen: array<u32>;
@group(0) @binding(4) var<uniform> params: Params;

const WORKGROUP_SIZE: u32 = {{ WORKGROUP_SIZE }}u;
// Above the bits of 1.0, the largest weight.
const TOP_BIT: i32 = 29;
const NOT_FOUND: u32 = 0xffffffffu;
var<workgroup> sums: array<f32, WORKGROUP_SIZE>;
var<workgroup> counts: array<u32, WORKGROUP_SIZE>;
var<workgroup> shared_sum: f32;
var<workgroup> shared_count: u32;

// The sum of weights of at least `bound`.
fn mass(base: u32, lane: u32, bound: u32) -> f32 {
    var sum = 0.0;
    for (var i = lane; i < params.width; i += WORKGROUP_SIZE) {
        let weight = scores[base + i];
        sum += select(0.0, weight, bitcast<u32>(weight) >= bound);
    }
    sums[lane] = sum;
    workgroupBarrier();
    for (var stride = WORKGROUP_SIZE / 2u; stride > 0u; stride >>= 1u) {
        if (lane < stride) {
            sums[lane] += sums[lane + stride];
        }
        workgroupBarrier();
    }
    if (lane == 0u) {
        shared_sum = sums[0];
    }
    return workgroupUniformLoad(&shared_sum);
}

// How many weights are at least `bound`.
fn count(base: u32, lane: u32, bound: u32) -> u32 {
    var number = 0u;
    for (var i = lane; i < params.width; i += WORKGROUP_SIZE) {
        number += select(0u, 1u, bitcast<u32>(scores[base + i]) >= bound);
    }
    counts[lane] = number;
    workgroupBarrier();
    for (var stride = WORKGROUP_SIZE / 2u; stride > 0u; stride >>= 1u) {
        if (lane < stride) {
            counts[lane] += counts[lane + stride];
        }
        workgroupBarrier();
    }
    if (lane == 0u) {
        shared_count = counts[0];
    }
    return workgroupUniformLoad(&shared_count);
}

@compute @workgroup_size(WORKGROUP_SIZE)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = workgroup.x;
    let draw = draws[row];
    let largest = best[row];
    if (draw.kind != 1u || largest.x == NOT_FOUND) {
        if (lane == 0u) {
            chosen[row] = select(largest.x, draw.token, draw.kind == 2u);
        }
        return;
    }
    let base = row * params.width;
    for (var i = lane; i < params.width; i += WORKGROUP_SIZE) {
        let weight = min(exp((scores[base + i] - bitcast<f32>(largest.y)) * draw.inverse_temperature), 1.0);
        scores[base + i] = select(0.0, weight, weight >= draw.min_p);
    }
    storageBarrier();
    // Weights of zero are never drawn.
    var bound = 1u;
    if (draw.top_k > 0u && draw.top_k < params.width) {
        var kth = 0u;
        for (var bit = TOP_BIT; bit >= 0; bit--) {
            let candidate = kth | (1u << u32(bit));
            if (count(base, lane, candidate) >= draw.top_k) {
                kth = candidate;
            }
        }
        bound = max(bound, kth);
    }
    if (draw.top_p < 1.0) {
        let wanted = draw.top_p * mass(base, lane, bound);
        var reached = 0u;
        for (var bit = TOP_BIT; bit >= 0; bit--) {
            let candidate = reached | (1u << u32(bit));
            if (mass(base, lane, max(candidate, bound)) >= wanted) {
                reached = candidate;
            }
        }
        bound = max(bound, reached);
    }
    // Each lane sums a run of neighbours; the lane in whose run the sum passes the target walks it again.
    let run = (params.width + WORKGROUP_SIZE - 1u) / WORKGROUP_SIZE;
    let first = min(lane * run, params.width);
    let last = min(first + run, params.width);
    var sum = 0.0;
    for (var i = first; i < last; i++) {
        let weight = scores[base + i];
        sum += select(0.0, weight, bitcast<u32>(weight) >= bound);
    }
    sums[lane] = sum;
    workgroupBarrier();
    if (lane == 0u) {
        var total = 0.0;
        for (var i = 0u; i < WORKGROUP_SIZE; i++) {
            total += sums[i];
        }
        let target_sum = draw.uniform * total;
        var before = 0.0;
        var at = 0u;
        for (var i = 0u; i < WORKGROUP_SIZE; i++) {
            // The last run that has any is taken where rounding keeps the sum from passing the target.
            if (sums[i] > 0.0) {
                at = i;
                if (before + sums[i] > target_sum) {
                    break;
                }
                before += sums[i];
            }
        }
        var token = largest.x;
        for (var i = at * run; i < min(at * run + run, params.width); i++) {
            let weight = scores[base + i];
            if (bitcast<u32>(weight) >= bound) {
                token = i;
                before += weight;
                if (before > target_sum) {
                    break;
                }
            }
        }
        chosen[row] = token;
    }
}
