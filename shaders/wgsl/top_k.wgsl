// The k largest values of a row with their indices, in no particular order; the lowest index wins a tie for the last place.
//
// One workgroup a row. Radix select: floats are mapped to integers of the same order, four passes of a 256-bin histogram
// find the k-th largest key, one pass collects what lies above it, and the places left are filled with the lowest indices
// whose key equals it. A NaN has a key like any value: argmax, which runs beside, tells of it.

struct Params {
    width: u32,
    k: u32,            // at least 1, at most width
    output_stride: u32,
    pad0: u32,
}

@group(0) @binding(0) var<storage, read> values: array<f32>;
@group(0) @binding(1) var<storage, read_write> top: array<vec2<u32>>;
@group(0) @binding(2) var<uniform> params: Params;

const WORKGROUP_SIZE: u32 = {{ WORKGROUP_SIZE }}u;
var<workgroup> histogram: array<atomic<u32>, 256>;
var<workgroup> threshold: u32;
var<workgroup> remaining: u32;
var<workgroup> num_found: atomic<u32>;
var<workgroup> lowest: atomic<u32>;

// Larger float, larger key; -0 below +0.
fn key_of(bits: u32) -> u32 {
    return select(bits | 0x80000000u, ~bits, (bits & 0x80000000u) != 0u);
}

@compute @workgroup_size(WORKGROUP_SIZE)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let base = workgroup.x * params.width;
    if (lane == 0u) {
        threshold = 0u;
        remaining = params.k;
        atomicStore(&num_found, 0u);
    }
    // Pass by pass the known high byte(s) of the k-th key grow; `remaining` is k less what lies above them.
    for (var shift = 24i; shift >= 0i; shift -= 8i) {
        for (var bin = lane; bin < 256u; bin += WORKGROUP_SIZE) {
            atomicStore(&histogram[bin], 0u);
        }
        workgroupBarrier();
        let known_mask = select(0xffffffffu << (u32(shift) + 8u), 0u, shift == 24i);
        let known = workgroupUniformLoad(&threshold);
        for (var i = lane; i < params.width; i += WORKGROUP_SIZE) {
            let bits = bitcast<u32>(values[base + i]);
            let key = key_of(bits);
            if ((key & known_mask) == known) {
                atomicAdd(&histogram[(key >> u32(shift)) & 0xffu], 1u);
            }
        }
        workgroupBarrier();
        if (lane == 0u) {
            var bin = 255u;
            var left = remaining;
            for (; bin > 0u; bin--) {
                let count = atomicLoad(&histogram[bin]);
                if (count >= left) {
                    break;
                }
                left -= count;
            }
            remaining = left;
            threshold = threshold | (bin << u32(shift));
        }
        workgroupBarrier();
    }
    let kth = workgroupUniformLoad(&threshold);
    let target_base = workgroup.x * params.output_stride;
    for (var i = lane; i < params.width; i += WORKGROUP_SIZE) {
        let bits = bitcast<u32>(values[base + i]);
        if (key_of(bits) > kth) {
            let place = atomicAdd(&num_found, 1u);
            top[target_base + place] = vec2<u32>(i, bits);
        }
    }
    let ties = workgroupUniformLoad(&remaining);
    var after = 0u;
    for (var tie = 0u; tie < ties; tie++) {
        if (lane == 0u) {
            atomicStore(&lowest, 0xffffffffu);
        }
        workgroupBarrier();
        for (var i = lane; i < params.width; i += WORKGROUP_SIZE) {
            let bits = bitcast<u32>(values[base + i]);
            if (i >= after && key_of(bits) == kth) {
                atomicMin(&lowest, i);
                break;
            }
        }
        workgroupBarrier();
        let index = atomicLoad(&lowest);
        if (lane == 0u) {
            top[target_base + params.k - ties + tie] = vec2<u32>(index, bitcast<u32>(values[base + index]));
        }
        after = index + 1u;
        workgroupBarrier();
    }
}
