//! Which variant of each kernel runs: one pure choice at start from what the adapter is.
//!
//! Made by the ops, read by the wrappers. Software adapters do loads lane by lane, so there the matrix kernels take
//! several rows a lane and int8 activations; on hardware lanes share rows, and many tokens share tiles.

use shaders::{Value, Variant};

use super::{Arithmetic, Gpu, Placement};
use crate::device::Traits;
use crate::kv::{BLOCK_SIZE, KvLayout};

/// Tokens a split of `paged_attention_decode`: constant, so that the order of sums is.
pub const SPLIT: u32 = 64;

/// Lanes that share loads: the subgroup of Mesa's software adapters.
const SHARING_LANES: u32 = 8;

/// Half a tile: below, most of its lanes would have nothing to do.
const TILED_ROWS: u32 = 32;

/// How activations enter a matrix product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activations {
    /// As they are.
    F32,
    /// Those of prompts in half precision, on matrix units where the adapter has them.
    F16,
    /// Rounded to int8 in blocks of 32, where the weight format has integer codes.
    Int8,
}

/// How a matrix kernel divides its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatmulShape {
    /// Rows an invocation.
    pub rows: u32,
    /// Tokens an invocation.
    pub tokens: u32,
    /// Invocations a workgroup.
    pub workgroup_size: u32,
    /// Parts of a row that lanes of a workgroup sum beside each other; of f32 activations only.
    pub slices: u32,
    /// Whether a workgroup is one subgroup of eight lanes that share loads; of int8 activations only.
    pub share: bool,
}

/// All choices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Activations of matrix products.
    pub activations: Activations,
    /// One row of the step.
    pub single: MatmulShape,
    /// Several rows of the step.
    pub several: MatmulShape,
    /// Rows of a step from which on a product is tiled; as `several` it sums, so nothing else shows. `None` is never.
    pub tiled_rows: Option<u32>,
    /// The rows of prompts, where those are computed in an arithmetic of their own.
    pub prefill: Option<Arithmetic>,
    /// How kernels that reduce a row add up.
    pub sum: &'static str,
    /// Invocations a workgroup of elementwise kernels.
    pub workgroup_size: u32,
    /// Invocations a workgroup of kernels that reduce a row.
    pub reduce_size: u32,
    /// Invocations a workgroup of `paged_attention_decode`.
    pub decode_size: u32,
    /// Whether such a workgroup is a team that has one split.
    pub decode_team: bool,
    /// Invocations a workgroup of `rotate_and_cache`.
    pub head_size: u32,
    /// Queries a workgroup of `paged_attention_prefill`.
    pub query_tile: u32,
    /// Query heads of one KV head that an invocation or a team takes at most: of decodes, and of prompts.
    pub max_heads: [u32; 2],
    /// Tokens a split of `paged_attention_decode`: constant, so that the order of sums is.
    pub split: u32,
    /// Multiply-adds a submit.
    pub max_work: u64,
    /// Rows of the tallest image, where weights lie in images.
    pub image_rows: Option<u32>,
}

impl Plan {
    /// The plan of an adapter.
    pub fn choose(traits: Traits) -> Self {
        if traits.software {
            let share = traits.subgroup_size == Some(SHARING_LANES);
            let shape = MatmulShape { rows: 4, tokens: 1, workgroup_size: SHARING_LANES, slices: 1, share };
            Self {
                activations: Activations::Int8,
                single: shape,
                several: MatmulShape { tokens: if share { 8 } else { 4 }, ..shape },
                tiled_rows: None,
                sum: if share { "subgroup" } else { "memory" },
                max_work: 200_000_000,
                // One vector of the CPU: a workgroup of more is run by one thread and takes turns at barriers.
                workgroup_size: SHARING_LANES,
                reduce_size: SHARING_LANES,
                decode_size: SHARING_LANES,
                head_size: SHARING_LANES,
                query_tile: if share { SHARING_LANES } else { 32 },
                max_heads: [4, 4],
                decode_team: false,
                // Of the software adapters those with such subgroups are Mesa's, whose image loads are the faster ones.
                image_rows: traits.image_rows.filter(|_| share),
                ..Self::baseline()
            }
        } else {
            let sum = if traits.subgroups { "subgroups" } else { "memory" };
            let plan = Self { sum, ..Self::baseline() };
            let activations = if traits.has_matrices() { Activations::F16 } else { Activations::F32 };
            plan.with_activations(activations, traits)
        }
    }

    /// The same with these activations.
    pub fn with_activations(mut self, activations: Activations, traits: Traits) -> Self {
        self.activations = activations;
        self.prefill = match activations {
            Activations::F32 | Activations::Int8 => None,
            Activations::F16 => {
                // Of which weights lie in buffers.
                self.image_rows = None;
                Some(match traits.matrix_size.filter(|_| traits.has_matrices()) {
                    Some(16) => Arithmetic::Matrix16,
                    Some(_) => Arithmetic::Matrix8,
                    None => Arithmetic::F16,
                })
            }
        };
        self
    }

    /// What computes, for the name of a class of equal bits.
    pub fn arithmetic(&self) -> &'static str {
        match (self.activations, self.prefill) {
            (Activations::Int8, _) => "int8",
            (_, Some(Arithmetic::F16)) => "f16",
            (_, Some(Arithmetic::Matrix8)) => "m8",
            (_, Some(Arithmetic::Matrix16)) => "m16",
            _ => "f32",
        }
    }

    /// WebGPU's default limits, f32.
    pub fn baseline() -> Self {
        Self {
            activations: Activations::F32,
            single: MatmulShape { rows: 1, tokens: 1, workgroup_size: 256, slices: 8, share: false },
            several: MatmulShape { rows: 1, tokens: 8, workgroup_size: 256, slices: 8, share: false },
            tiled_rows: Some(TILED_ROWS),
            prefill: None,
            sum: "memory",
            workgroup_size: 64,
            reduce_size: 256,
            decode_size: SPLIT,
            head_size: 32,
            query_tile: 32,
            // More of them would pass the registers of a lane of prompts.
            max_heads: [8, 1],
            decode_team: true,
            split: SPLIT,
            max_work: 20_000_000_000,
            image_rows: None,
        }
    }

    /// The matrix shape for this many rows of a step. Both shapes sum an element in one order, so the choice shows in
    /// time only.
    pub fn matmul_shape(&self, num_rows: usize) -> MatmulShape {
        if num_rows == 1 { self.single } else { self.several }
    }

    /// Query heads of one KV head that an invocation or a team takes, all of which share its loads: of decodes.
    pub fn decode_heads(&self, layout: &KvLayout) -> u32 {
        heads_of(layout, self.max_heads[0])
    }

    /// The same of prompts.
    pub fn prefill_heads(&self, layout: &KvLayout) -> u32 {
        heads_of(layout, self.max_heads[1])
    }

    /// Where weights lie.
    pub fn placement(&self, gpu: &Gpu) -> Placement {
        Placement { max_binding_bytes: gpu.max_binding_bytes(), image_rows: self.image_rows }
    }

    /// An elementwise kernel's variant.
    pub fn elementwise(&self, shader: &'static shaders::Shader) -> Variant {
        Variant::new(shader, &[("WORKGROUP_SIZE", Value::Number(self.workgroup_size))])
    }

    /// A row-reducing kernel's variant.
    pub fn reduction(&self, shader: &'static shaders::Shader, workgroup_size: u32) -> Variant {
        Variant::new(shader, &[("WORKGROUP_SIZE", Value::Number(workgroup_size))])
    }

    /// Tokens a block as the kernels want it.
    pub fn block_size() -> Value {
        Value::Number(BLOCK_SIZE as u32)
    }
}

/// The most heads that divide a group.
fn heads_of(layout: &KvLayout, most: u32) -> u32 {
    let group = (layout.num_heads / layout.num_kv_heads) as u32;
    (1..=most).rev().find(|heads| group.is_multiple_of(*heads)).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOFTWARE: Traits = Traits {
        software: true,
        subgroups: false,
        subgroup_size: None,
        image_rows: Some(8192),
        f16: true,
        matrix_size: None,
    };
    const MESA: Traits = Traits { subgroups: true, subgroup_size: Some(8), ..SOFTWARE };
    const HARDWARE: Traits = Traits { software: false, subgroups: true, subgroup_size: Some(32), ..SOFTWARE };
    const TENSOR: Traits = Traits { matrix_size: Some(16), ..HARDWARE };

    #[test]
    fn only_software_adapters_round_activations() {
        assert_eq!(Plan::choose(SOFTWARE).activations, Activations::Int8);
        assert_eq!(Plan::choose(HARDWARE), Plan { sum: "subgroups", ..Plan::baseline() });
        assert_eq!(Plan::choose(Traits { subgroups: false, ..HARDWARE }), Plan::baseline());
        assert_eq!(Plan::choose(SOFTWARE).matmul_shape(1).tokens, 1);
        assert_eq!(Plan::choose(SOFTWARE).matmul_shape(2).tokens, 4);
    }

    #[test]
    fn lanes_share_loads_where_a_subgroup_is_eight() {
        let of_four = Traits { subgroup_size: Some(4), ..SOFTWARE };
        assert!(Plan::choose(MESA).single.share && !Plan::choose(of_four).single.share);
        assert_eq!(Plan::choose(MESA).several.tokens, 8);
        // An element is summed in one order, whichever it is.
        assert_eq!(Plan::choose(MESA).single.rows, Plan::choose(SOFTWARE).single.rows);
    }

    #[test]
    fn prompts_take_matrices_where_subgroups_are_of_thirty_two() {
        let prefill = |traits| Plan::choose(traits).prefill;
        assert_eq!(prefill(TENSOR), Some(Arithmetic::Matrix16));
        assert_eq!(prefill(Traits { matrix_size: Some(8), ..TENSOR }), Some(Arithmetic::Matrix8));
        for traits in [Traits { subgroup_size: Some(64), ..TENSOR }, Traits { f16: false, ..TENSOR }, HARDWARE] {
            assert_eq!(prefill(traits), None, "{traits:?}");
        }
        let asked = |activations| Plan::choose(TENSOR).with_activations(activations, TENSOR).prefill;
        assert_eq!([asked(Activations::F32), asked(Activations::Int8)], [None, None]);
        let halves = Plan::choose(MESA).with_activations(Activations::F16, MESA);
        assert_eq!((halves.prefill, halves.image_rows, halves.arithmetic()), (Some(Arithmetic::F16), None, "f16"));
    }

    #[test]
    fn weights_lie_in_images_where_those_are_the_faster() {
        assert_eq!(Plan::choose(MESA).image_rows, Some(8192));
        for traits in [SOFTWARE, HARDWARE, Traits { image_rows: None, ..MESA }] {
            assert_eq!(Plan::choose(traits).image_rows, None, "{traits:?}");
        }
    }

    #[test]
    fn every_variant_of_a_plan_is_among_those_that_are_validated() {
        let known: Vec<String> = shaders::variants().iter().map(Variant::label).collect();
        let has = |shader: &str, values: &str| {
            let label = format!("{shader}[{values}]");
            assert!(known.contains(&label), "{label} is not validated");
        };
        let buffers = Traits { image_rows: None, ..MESA };
        let adapters = [SOFTWARE, MESA, buffers, HARDWARE, Traits::default(), TENSOR];
        let asked = adapters.iter().flat_map(|&traits| {
            let all = [Activations::F32, Activations::F16, Activations::Int8];
            all.map(|activations| Plan::choose(traits).with_activations(activations, traits))
        });
        for plan in adapters.map(Plan::choose).into_iter().chain(asked) {
            let image = u32::from(plan.image_rows.is_some());
            for shape in [plan.single, plan.several] {
                let MatmulShape { rows, tokens, workgroup_size, slices, share } = shape;
                for format in ["f32", "f16", "bf16", "q4", "q5", "q8", "q4k", "q5k", "q6k"] {
                    let matrix = format!("FORMAT={format},IMAGE={image},ROWS={rows}");
                    let values = format!("{matrix},SLICES={slices},TOKENS={tokens},WORKGROUP_SIZE={workgroup_size}");
                    has("matmul", &values);
                    for arithmetic in plan.prefill.into_iter().chain(plan.tiled_rows.map(|_| Arithmetic::F32)) {
                        has("matmul_tiled", &format!("ARITHMETIC={},FORMAT={format}", arithmetic.word()));
                    }
                    if format.starts_with('q') {
                        let share = u32::from(share);
                        let values = format!("{matrix},SHARE={share},TOKENS={tokens},WORKGROUP_SIZE={workgroup_size}");
                        has("matmul_int8", &values);
                    }
                }
            }
            let Plan { workgroup_size, reduce_size, decode_size, query_tile, split, head_size, max_heads, sum, .. } =
                plan;
            for shader in ["add_bias", "gather_rows", "soft_cap", "quantize_activations", "adjust_logits"] {
                has(shader, &format!("WORKGROUP_SIZE={workgroup_size}"));
            }
            for quantize in [0, 1] {
                for activation in ["silu", "gelu"] {
                    let values = format!("ACTIVATION={activation},QUANTIZE={quantize},WORKGROUP_SIZE={workgroup_size}");
                    has("act_and_mul", &values);
                }
                has("rms_norm", &format!("QUANTIZE={quantize},SUM={sum},WORKGROUP_SIZE={reduce_size}"));
            }
            for (kv, norm) in [("f16", 0), ("f16", 1), ("q8_0", 0), ("q8_0", 1)] {
                let values =
                    format!("BLOCK_SIZE={BLOCK_SIZE},KV={kv},NORM={norm},SUM={sum},WORKGROUP_SIZE={head_size}");
                has("rotate_and_cache", &values);
            }
            has("argmax", &format!("WORKGROUP_SIZE={reduce_size}"));
            for head_dim in (8..=256).step_by(8) {
                for quantize in 0..=u32::from(head_dim % 32 == 0) {
                    let values = format!("HEAD_DIM={head_dim},QUANTIZE={quantize},WORKGROUP_SIZE={workgroup_size}");
                    has("paged_attention_reduce", &values);
                }
                let caches = ["f16", "q8_0"].into_iter().take(1 + usize::from(head_dim % 32 == 0));
                for kv in caches {
                    let row = |heads| format!("BLOCK_SIZE={BLOCK_SIZE},HEADS={heads},HEAD_DIM={head_dim},KV={kv}");
                    let (team, share) = (u32::from(plan.decode_team), u32::from(plan.single.share));
                    for heads in 1..=max_heads[0] {
                        let decode = format!("{},SPLIT={split},TEAM={team},WORKGROUP_SIZE={decode_size}", row(heads));
                        has("paged_attention_decode", &decode);
                    }
                    for heads in 1..=max_heads[1] {
                        let prefill = format!("{},QUERY_TILE={query_tile},SHARE={share}", row(heads));
                        has("paged_attention_prefill", &prefill);
                    }
                }
            }
        }
    }
}
