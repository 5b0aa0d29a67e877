// Biases and penalties of the few tokens that have any, in place.
//
// An invocation an entry; no two entries name the same logit. A positive logit is divided by the repetition penalty, any
// other multiplied with it, so that a penalty always makes a token less likely.

struct Params {
    num_entries: u32,
    row_width: u32,    // invocations a grid row, since a grid dimension is bounded
    pad0: u32,
    pad1: u32,
}

struct Entry {
    index: u32,        // row * width + token
    bias: f32,         // added first
    repetition: f32,   // 1 is off
    subtract: f32,     // taken last
}

@group(0) @binding(0) var<storage, read> entries: array<Entry>;
@group(0) @binding(1) var<storage, read_write> logits: array<f32>;
@group(0) @binding(2) var<uniform> params: Params;

@compute @workgroup_size({{ WORKGROUP_SIZE }})
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let i = id.y * params.row_width + id.x;
    if (id.x >= params.row_width || i >= params.num_entries) {
        return;
    }
    let entry = entries[i];
    let biased = logits[entry.index] + entry.bias;
    let penalised = select(biased * entry.repetition, biased / entry.repetition, biased > 0.0);
    logits[entry.index] = penalised - entry.subtract;
}
