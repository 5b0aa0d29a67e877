// best[row] = (index of the largest value, its bits); the lowest index wins a tie, a NaN anywhere makes the index NOT_FOUND.
//
// One workgroup a row. NaN is tested on the bits: WGSL may assume that comparisons never see one.

struct Params {
    width: u32,
    pad0: u32,
    pad1: u32,
    pad2: u32,
}

@group(0) @binding(0) var<storage, read> values: array<f32>;
@group(0) @binding(1) var<storage, read_write> best: array<vec2<u32>>;
@group(0) @binding(2) var<uniform> params: Params;

const WORKGROUP_SIZE: u32 = {{ WORKGROUP_SIZE }}u;
const NOT_FOUND: u32 = 0xffffffffu;
var<workgroup> best_index: array<u32, WORKGROUP_SIZE>;
var<workgroup> best_value: array<f32, WORKGROUP_SIZE>;
var<workgroup> num_nans: atomic<u32>;

fn is_nan(bits: u32) -> bool {
    return (bits & 0x7fffffffu) > 0x7f800000u;
}

@compute @workgroup_size(WORKGROUP_SIZE)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    if (lane == 0u) {
        atomicStore(&num_nans, 0u);
    }
    workgroupBarrier();
    let base = workgroup.x * params.width;
    var index = NOT_FOUND;
    var value = 0.0;
    var saw_nan = false;
    for (var i = lane; i < params.width; i += WORKGROUP_SIZE) {
        let x = values[base + i];
        saw_nan = saw_nan || is_nan(bitcast<u32>(x));
        if (index == NOT_FOUND || x > value) {
            index = i;
            value = x;
        }
    }
    if (saw_nan) {
        atomicAdd(&num_nans, 1u);
    }
    best_index[lane] = index;
    best_value[lane] = value;
    workgroupBarrier();
    for (var stride = WORKGROUP_SIZE / 2u; stride > 0u; stride >>= 1u) {
        if (lane < stride) {
            let other = best_index[lane + stride];
            let other_value = best_value[lane + stride];
            let mine = best_index[lane];
            if (other != NOT_FOUND) {
                let wins = mine == NOT_FOUND || other_value > best_value[lane]
                    || (other_value == best_value[lane] && other < mine);
                if (wins) {
                    best_index[lane] = other;
                    best_value[lane] = other_value;
                }
            }
        }
        workgroupBarrier();
    }
    if (lane == 0u) {
        let found = select(best_index[0], NOT_FOUND, atomicLoad(&num_nans) > 0u);
        best[workgroup.x] = vec2<u32>(found, bitcast<u32>(best_value[0]));
    }
}
