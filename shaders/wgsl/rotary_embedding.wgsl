// Rotates the first 2 * num_pairs values of every head by its token's position, in place.
//
// rotations[token, pair] = (cos, sin) of position * frequency, computed by the host in f64: the GPU's own sine loses
// digits at large positions. With pair_stride 1 a pair is two neighbours (x[2i], x[2i + 1]), the order of GGUF's llama;
// with pair_stride = num_pairs it is the two halves (x[i], x[i + num_pairs]), the order of Hugging Face.

struct Params {
    num_heads: u32,
    head_dim: u32,
    num_pairs: u32,
    pair_stride: u32,
}

@group(0) @binding(0) var<storage, read> rotations: array<vec2<f32>>;
@group(0) @binding(1) var<storage, read_write> values: array<f32>;
@group(0) @binding(2) var<uniform> params: Params;

@compute @workgroup_size({{ WORKGROUP_SIZE }})
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let token = id.y;
    if (id.x >= params.num_heads * params.num_pairs) {
        return;
    }
    let head = id.x / params.num_pairs;
    let pair = id.x - head * params.num_pairs;
    let rotation = rotations[token * params.num_pairs + pair];
    let first = (token * params.num_heads + head) * params.head_dim + select(pair, pair * 2u, params.pair_stride == 1u);
    let second = first + params.pair_stride;
    let a = values[first];
    let b = values[second];
    values[first] = fma(a, rotation.x, -(b * rotation.y));
    values[second] = fma(a, rotation.y, b * rotation.x);
}
