//! Every variant that the engine's plan may choose, so that a test can validate and translate all of them.

use crate::template::{Value, Variant};
use crate::{
    ACT_AND_MUL, ARGMAX, CATALOGUE, EMBEDDING, MATMUL, MATMUL_INT8, MATMUL_TILED, PAGED_ATTENTION_DECODE,
    PAGED_ATTENTION_REDUCE, RMS_NORM, ROTATE_AND_CACHE, SAMPLE, TOKEN_LOGPROBS, TOP_K,
};
use Value::{Number, Word};

/// Tokens of one KV block.
pub(crate) const BLOCK_SIZE: u32 = 16;
const FORMATS: [&str; 9] = ["f32", "f16", "bf16", "q4", "q5", "q8", "q4k", "q5k", "q6k"];
/// Those with integer codes.
const CODE_FORMATS: [&str; 6] = ["q4", "q5", "q8", "q4k", "q5k", "q6k"];
/// Widths of heads that a model may have: whole vec4<u32> of f16.
fn head_dims() -> impl Iterator<Item = u32> {
    (8..=256).step_by(8)
}
/// (rows a lane, tokens a lane, workgroup size): one token and several, on hardware, then on software adapters.
const MATMUL_SHAPES: [(u32, u32, u32); 4] = [(1, 1, 256), (1, 8, 256), (4, 1, 8), (4, 4, 8)];
/// The same where lanes share loads.
const SHARING_SHAPES: [(u32, u32, u32); 2] = [(4, 1, 8), (4, 8, 8)];

/// Invocations a workgroup on hardware and on software adapters, of kernels that take either.
const SIZES: [u32; 2] = [64, 8];

/// All variants, each kernel at least once.
pub fn variants() -> Vec<Variant> {
    CATALOGUE
        .iter()
        .flat_map(|shader| match shader.name {
            name if name == EMBEDDING.name => embeddings(&FORMATS),
            name if name == MATMUL.name => matmuls(&FORMATS),
            name if name == MATMUL_TILED.name => tiled(&FORMATS),
            name if name == MATMUL_INT8.name => matmuls_int8(&CODE_FORMATS),
            name if name.starts_with("paged_attention") => attention(shader),
            name if name == ROTATE_AND_CACHE.name => {
                let of = |((kv, norm), (sum, size))| {
                    let values = [
                        ("BLOCK_SIZE", Number(BLOCK_SIZE)),
                        ("KV", Word(kv)),
                        ("NORM", Number(norm)),
                        ("SUM", Word(sum)),
                        ("WORKGROUP_SIZE", Number(size)),
                    ];
                    Variant::new(&ROTATE_AND_CACHE, &values)
                };
                let caches = [("f16", 0), ("f16", 1), ("q8_0", 0), ("q8_0", 1)];
                pairs(caches.into_iter(), [("memory", 32), ("subgroups", 32), ("memory", 8), ("subgroup", 8)])
                    .map(of)
                    .collect()
            }
            name if name == ACT_AND_MUL.name => {
                let of = |((activation, quantize), size)| {
                    let values = [
                        ("ACTIVATION", Word(activation)),
                        ("QUANTIZE", Number(quantize)),
                        ("WORKGROUP_SIZE", Number(size)),
                    ];
                    Variant::new(&ACT_AND_MUL, &values)
                };
                pairs([("silu", 0), ("silu", 1), ("gelu", 0), ("gelu", 1)].into_iter(), SIZES).map(of).collect()
            }
            name if name == RMS_NORM.name => {
                let of = |(quantize, (sum, size))| {
                    let values = [("QUANTIZE", Number(quantize)), ("SUM", Word(sum)), ("WORKGROUP_SIZE", Number(size))];
                    Variant::new(&RMS_NORM, &values)
                };
                pairs([0, 1].into_iter(), [("memory", 256), ("subgroups", 256), ("memory", 8), ("subgroup", 8)])
                    .map(of)
                    .collect()
            }
            name if [TOP_K.name, SAMPLE.name, TOKEN_LOGPROBS.name].contains(&name) => {
                vec![Variant::new(shader, &[("WORKGROUP_SIZE", Number(256))])]
            }
            name if name == ARGMAX.name => {
                [256, 8].map(|size| Variant::new(&ARGMAX, &[("WORKGROUP_SIZE", Number(size))])).to_vec()
            }
            _ => SIZES.map(|size| Variant::new(shader, &[("WORKGROUP_SIZE", Number(size))])).to_vec(),
        })
        .collect()
}

/// What the cache holds, for heads of this width: blocks of 32 values have a scale.
fn caches(head_dim: u32) -> impl Iterator<Item = &'static str> {
    ["f16", "q8_0"].into_iter().take(1 + usize::from(head_dim.is_multiple_of(32)))
}

/// Of one of the attention kernels: by width of a head.
fn attention(shader: &'static crate::Shader) -> Vec<Variant> {
    let decode = |head_dim, kv, (heads, team, size)| {
        let values = [
            ("BLOCK_SIZE", Number(BLOCK_SIZE)),
            ("HEADS", Number(heads)),
            ("HEAD_DIM", Number(head_dim)),
            ("KV", Word(kv)),
            ("SPLIT", Number(64)),
            ("TEAM", Number(team)),
            ("WORKGROUP_SIZE", Number(size)),
        ];
        Variant::new(shader, &values)
    };
    let reduce = |(head_dim, (quantize, size))| {
        let values = [("HEAD_DIM", Number(head_dim)), ("QUANTIZE", Number(quantize)), ("WORKGROUP_SIZE", Number(size))];
        Variant::new(shader, &values)
    };
    let prefill = |head_dim, kv, (heads, query_tile, share)| {
        let values = [
            ("BLOCK_SIZE", Number(BLOCK_SIZE)),
            ("HEADS", Number(heads)),
            ("HEAD_DIM", Number(head_dim)),
            ("KV", Word(kv)),
            ("QUERY_TILE", Number(query_tile)),
            ("SHARE", Number(share)),
        ];
        Variant::new(shader, &values)
    };
    let rounds = |&(head_dim, (quantize, _)): &(u32, (u32, u32))| quantize == 0 || head_dim % 32 == 0;
    let cached = || head_dims().flat_map(|head_dim| caches(head_dim).map(move |kv| (head_dim, kv)));
    // On software adapters up to four heads a lane; on hardware up to eight a workgroup for decodes, one a lane for prompts.
    let decodes = || (1..=4).map(|heads| (heads, 0, 8)).chain((1..=8).map(|heads| (heads, 1, 64)));
    let prefills = || (1..=4).flat_map(|heads| [(heads, 32, 0), (heads, 8, 1)]);
    match shader.name {
        name if name == PAGED_ATTENTION_DECODE.name => {
            cached().flat_map(|(head_dim, kv)| decodes().map(move |of| decode(head_dim, kv, of))).collect()
        }
        name if name == PAGED_ATTENTION_REDUCE.name => {
            pairs(head_dims(), [(0, 64), (0, 8), (1, 64), (1, 8)]).filter(rounds).map(reduce).collect()
        }
        _ => cached().flat_map(|(head_dim, kv)| prefills().map(move |of| prefill(head_dim, kv, of))).collect(),
    }
}

/// Every pair of two lists' entries.
fn pairs<A: Copy, B: Copy, const N: usize>(
    first: impl Iterator<Item = A>,
    second: [B; N],
) -> impl Iterator<Item = (A, B)> {
    first.flat_map(move |a| second.map(|b| (a, b)))
}

fn embeddings(formats: &[&'static str]) -> Vec<Variant> {
    let of = |(format, (image, size))| {
        let values = [("FORMAT", Word(format)), ("IMAGE", Number(image)), ("WORKGROUP_SIZE", Number(size))];
        Variant::new(&EMBEDDING, &values)
    };
    pairs(formats.iter().copied(), [(0, 64), (0, 8), (1, 8)]).map(of).collect()
}

/// A matrix product, its weights in images or buffers.
fn matmul(shader: &'static crate::Shader, format: &'static str, shape: (u32, u32, u32), image: u32) -> Variant {
    let (rows, tokens, workgroup_size) = shape;
    let values = [
        ("FORMAT", Word(format)),
        ("IMAGE", Number(image)),
        ("ROWS", Number(rows)),
        ("TOKENS", Number(tokens)),
        ("WORKGROUP_SIZE", Number(workgroup_size)),
    ];
    Variant::new(shader, &values)
}

/// On hardware a workgroup's lanes share rows.
fn with_slices(mut variant: Variant) -> Variant {
    let slices = if variant.values["WORKGROUP_SIZE"] == Number(256) { 8 } else { 1 };
    variant.values.insert("SLICES", Number(slices));
    variant
}

fn tiled(formats: &[&'static str]) -> Vec<Variant> {
    let of = |(format, arithmetic)| {
        Variant::new(&MATMUL_TILED, &[("ARITHMETIC", Word(arithmetic)), ("FORMAT", Word(format))])
    };
    pairs(formats.iter().copied(), ["f32", "f16", "matrix8", "matrix16"]).map(of).collect()
}

fn matmuls(formats: &[&'static str]) -> Vec<Variant> {
    // One of the sharing shapes is among the others.
    let buffers = MATMUL_SHAPES.into_iter().chain([SHARING_SHAPES[1]]).map(|shape| (shape, 0));
    let all: Vec<_> = buffers.chain(SHARING_SHAPES.map(|shape| (shape, 1))).collect();
    all.iter()
        .flat_map(|&(shape, image)| {
            formats.iter().map(move |format| with_slices(matmul(&MATMUL, format, shape, image)))
        })
        .collect()
}

fn matmuls_int8(formats: &[&'static str]) -> Vec<Variant> {
    let with = |share: u32, shape, format, image| {
        let mut variant = matmul(&MATMUL_INT8, format, shape, image);
        variant.values.insert("SHARE", Number(share));
        variant
    };
    let of = |&format: &&'static str| {
        let alone = MATMUL_SHAPES.map(|shape| with(0, shape, format, 0));
        let sharing = SHARING_SHAPES.iter().flat_map(move |&shape| [0, 1].map(|image| with(1, shape, format, image)));
        alone.into_iter().chain(sharing).collect::<Vec<_>>()
    };
    formats.iter().flat_map(of).collect()
}
