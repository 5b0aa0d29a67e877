{# Included by kernels that round activations to signed bytes in blocks of 32: code = round(x / scale), scale = max|x| / 127.
   Binds `codes` and `block_scales` of the including shader and defines `quantize(block, x)`, which writes eight words of
   codes and (scale, scale * sum of codes): the second folds a weight format's offset into one multiplication a block. #}
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

fn quantize(block: u32, x: array<vec4<f32>, 8>) {
    var peak = 0.0;
    var broken = false;
    {% for i in range(8) %}
    peak = max(peak, largest(x[{{ i }}]));
    broken = broken || not_finite(x[{{ i }}]);
    {% endfor %}
    let scale = peak / 127.0;
    let inverse = select(0.0, 127.0 / peak, peak > 0.0);
    var total = vec4<i32>(0);
    {% for i in range(8) %}
    let c{{ i }} = vec4<i32>(round(x[{{ i }}] * inverse));
    total += c{{ i }};
    {% endfor %}
    codes[block * 2u] = vec4<u32>(pack4xI8(c0), pack4xI8(c1), pack4xI8(c2), pack4xI8(c3));
    codes[block * 2u + 1u] = vec4<u32>(pack4xI8(c4), pack4xI8(c5), pack4xI8(c6), pack4xI8(c7));
    let sum = scale * f32(total.x + total.y + total.z + total.w);
    // A NaN or an infinity must reach the logits and not be rounded away.
    let scales = select(bitcast<vec2<u32>>(vec2<f32>(scale, sum)), vec2<u32>(NAN), broken);
    block_scales[block] = bitcast<vec2<f32>>(scales);
}
