//! Which variant of each kernel runs: one pure choice at start from what the adapter is.
//!
//! Made by the ops, read by the wrappers. Software adapters do loads lane by lane, so there the matrix kernels take
//! several rows a lane and int8 activations; on hardware one row a lane keeps neighbouring loads together.

use shaders::{Value, Variant};

use crate::kv::BLOCK_SIZE;

/// Tokens a split of `paged_attention_decode`: constant, so that the order of sums is.
pub const SPLIT: u32 = 64;

/// Lanes that share loads: the subgroup of Mesa's software adapters.
const SHARING_LANES: u32 = 8;

/// How activations enter a matrix product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activations {
    /// As they are.
    F32,
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
    /// Invocations a workgroup of elementwise kernels.
    pub workgroup_size: u32,
    /// Invocations a workgroup of kernels that reduce a row.
    pub reduce_size: u32,
    /// Invocations a workgroup of `paged_attention_decode`.
    pub decode_size: u32,
    /// Invocations a workgroup of `rotate_and_cache`.
    pub head_size: u32,
    /// Queries a workgroup of `paged_attention_prefill`.
    pub query_tile: u32,
    /// Tokens a split of `paged_attention_decode`: constant, so that the order of sums is.
    pub split: u32,
    /// Multiply-adds a submit.
    pub max_work: u64,
}

impl Plan {
    /// The plan of an adapter: a software or a hardware one, and the size of its subgroups where that is known and fixed.
    pub fn choose(software: bool, subgroup_size: Option<u32>) -> Self {
        if software {
            let share = subgroup_size == Some(SHARING_LANES);
            let shape = MatmulShape { rows: 4, tokens: 1, workgroup_size: SHARING_LANES, share };
            Self {
                activations: Activations::Int8,
                single: shape,
                several: MatmulShape { tokens: if share { 8 } else { 4 }, ..shape },
                max_work: 200_000_000,
                // One vector of the CPU: a workgroup of more is run by one thread and takes turns at barriers.
                workgroup_size: SHARING_LANES,
                reduce_size: SHARING_LANES,
                decode_size: SHARING_LANES,
                head_size: SHARING_LANES,
                ..Self::baseline()
            }
        } else {
            Self::baseline()
        }
    }

    /// WebGPU's default limits, f32.
    pub fn baseline() -> Self {
        Self {
            activations: Activations::F32,
            single: MatmulShape { rows: 1, tokens: 1, workgroup_size: 64, share: false },
            several: MatmulShape { rows: 1, tokens: 8, workgroup_size: 64, share: false },
            workgroup_size: 64,
            reduce_size: 64,
            decode_size: 32,
            head_size: 32,
            query_tile: 32,
            split: SPLIT,
            max_work: 20_000_000_000,
        }
    }

    /// The matrix shape for this many rows of a step. Both shapes sum an element in one order, so the choice shows in
    /// time only.
    pub fn matmul_shape(&self, num_rows: usize) -> MatmulShape {
        if num_rows == 1 { self.single } else { self.several }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_software_adapters_round_activations() {
        assert_eq!(Plan::choose(true, None).activations, Activations::Int8);
        assert_eq!(Plan::choose(false, Some(32)), Plan::baseline());
        assert_eq!(Plan::choose(true, None).matmul_shape(1).tokens, 1);
        assert_eq!(Plan::choose(true, None).matmul_shape(2).tokens, 4);
    }

    #[test]
    fn lanes_share_loads_where_a_subgroup_is_eight() {
        assert!(Plan::choose(true, Some(8)).single.share && !Plan::choose(true, Some(4)).single.share);
        assert_eq!(Plan::choose(true, Some(8)).several.tokens, 8);
        // An element is summed in one order, whichever it is.
        assert_eq!(Plan::choose(true, Some(8)).single.rows, Plan::choose(true, None).single.rows);
    }

    #[test]
    fn every_variant_of_a_plan_is_among_those_that_are_validated() {
        let known: Vec<String> = shaders::variants().iter().map(Variant::label).collect();
        let has = |shader: &str, values: &str| {
            let label = format!("{shader}[{values}]");
            assert!(known.contains(&label), "{label} is not validated");
        };
        for plan in [Plan::choose(true, None), Plan::choose(true, Some(8)), Plan::choose(false, None)] {
            for shape in [plan.single, plan.several] {
                let MatmulShape { rows, tokens, workgroup_size, share } = shape;
                for format in ["f32", "f16", "bf16", "q4", "q5", "q8", "q4k", "q5k", "q6k"] {
                    let values = format!("FORMAT={format},ROWS={rows},TOKENS={tokens},WORKGROUP_SIZE={workgroup_size}");
                    has("matmul", &values);
                    if format.starts_with('q') {
                        let share = u32::from(share);
                        let values = format!(
                            "FORMAT={format},ROWS={rows},SHARE={share},TOKENS={tokens},WORKGROUP_SIZE={workgroup_size}"
                        );
                        has("matmul_int8", &values);
                    }
                }
            }
            let Plan { workgroup_size, reduce_size, decode_size, query_tile, split, head_size, .. } = plan;
            for shader in ["add_bias", "gather_rows", "soft_cap", "quantize_activations", "adjust_logits"] {
                has(shader, &format!("WORKGROUP_SIZE={workgroup_size}"));
            }
            for quantize in [0, 1] {
                for activation in ["silu", "gelu"] {
                    let values = format!("ACTIVATION={activation},QUANTIZE={quantize},WORKGROUP_SIZE={workgroup_size}");
                    has("act_and_mul", &values);
                }
                has("rms_norm", &format!("QUANTIZE={quantize},WORKGROUP_SIZE={reduce_size}"));
            }
            for norm in [0, 1] {
                let values = format!("BLOCK_SIZE={BLOCK_SIZE},NORM={norm},WORKGROUP_SIZE={head_size}");
                has("rotate_and_cache", &values);
            }
            has("argmax", &format!("WORKGROUP_SIZE={reduce_size}"));
            for head_dim in (8..=256).step_by(8) {
                let decode =
                    format!("BLOCK_SIZE={BLOCK_SIZE},HEAD_DIM={head_dim},SPLIT={split},WORKGROUP_SIZE={decode_size}");
                has("paged_attention_decode", &decode);
                for quantize in 0..=u32::from(head_dim % 32 == 0) {
                    let values = format!("HEAD_DIM={head_dim},QUANTIZE={quantize},WORKGROUP_SIZE={workgroup_size}");
                    has("paged_attention_reduce", &values);
                }
                has(
                    "paged_attention_prefill",
                    &format!("BLOCK_SIZE={BLOCK_SIZE},HEAD_DIM={head_dim},QUERY_TILE={query_tile}"),
                );
            }
        }
    }
}
