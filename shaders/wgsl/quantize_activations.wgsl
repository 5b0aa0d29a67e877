// Rounds activations to signed bytes in blocks of 32: code = round(x / scale), scale = max|x| / 127.
//
// One invocation a block. Writes eight words of codes and (scale, scale * sum of codes): the second folds a weight
// format's offset into one multiplication a block.

struct Params {
    num_blocks: u32,   // blocks in all rows
    row_width: u32,    // invocations a grid row, since a grid dimension is bounded
    pad0: u32,
    pad1: u32,
}

@group(0) @binding(0) var<storage, read> input: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read_write> codes: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read_write> block_scales: array<vec2<f32>>;
@group(0) @binding(3) var<uniform> params: Params;

fn largest(v: vec4<f32>) -> f32 {
    let a = abs(v);
    return max(max(a.x, a.y), max(a.z, a.w));
}

const EXPONENT: u32 = 0x7f800000u;
const NAN: u32 = 0x7fc00000u;

// On the bits: WGSL may assume that values are finite.
fn not_finite(v: vec4<f32>) -> bool {
    return any((bitcast<vec4<u32>>(v) & vec4<u32>(EXPONENT)) == vec4<u32>(EXPONENT));
}

@compute @workgroup_size({{ WORKGROUP_SIZE }})
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let block = id.y * params.row_width + id.x;
    if (id.x >= params.row_width || block >= params.num_blocks) {
        return;
    }
    var peak = 0.0;
    var broken = false;
    {% for i in range(8) %}
    let x{{ i }} = input[block * 8u + {{ i }}u];
    peak = max(peak, largest(x{{ i }}));
    broken = broken || not_finite(x{{ i }});
    {% endfor %}
    let scale = peak / 127.0;
    let inverse = select(0.0, 127.0 / peak, peak > 0.0);
    var total = vec4<i32>(0);
    {% for i in range(8) %}
    let c{{ i }} = vec4<i32>(round(x{{ i }} * inverse));
    total += c{{ i }};
    {% endfor %}
    codes[block * 2u] = vec4<u32>(pack4xI8(c0), pack4xI8(c1), pack4xI8(c2), pack4xI8(c3));
    codes[block * 2u + 1u] = vec4<u32>(pack4xI8(c4), pack4xI8(c5), pack4xI8(c6), pack4xI8(c7));
    let sum = scale * f32(total.x + total.y + total.z + total.w);
    // A NaN or an infinity must reach the logits and not be rounded away.
    let scales = select(bitcast<vec2<u32>>(vec2<f32>(scale, sum)), vec2<u32>(NAN), broken);
    block_scales[block] = bitcast<vec2<f32>>(scales);
}
