//! `paged_attention_decode.wgsl`: partials of every split; contexts around block and split edges, shuffled blocks, poison.

use crate::harness::{ATTENTION, Harness, Output};
use engine::kernels::{Plan, paged_attention_decode};
use engine::kv::{KvCacheDtype, KvLayout};
use engine::ops::Attention;
use shaders::reference::{self, CacheView, Partial, Scale};

/// A ragged batch in decode over one poisoned cache.
pub struct Case {
    pub layout: KvLayout,
    pub query: Vec<f32>,
    pub key: Vec<f32>,
    pub value: Vec<f32>,
    pub block_tables: Vec<Vec<u32>>,
    pub context_lens: Vec<usize>,
    pub scale: Scale,
}

/// What lies where no token of a sequence does: NaN, and a finite value that no sum survives.
pub const POISONS: [f32; 2] = [f32::NAN, 60_000.0];

impl Case {
    /// Sequences of these context lengths with their blocks scattered by `shuffle`; everything else is `poison`.
    pub fn new(
        harness: &mut Harness,
        heads: [usize; 3],
        dtype: KvCacheDtype,
        context_lens: &[usize],
        shuffle: usize,
        poison: f32,
    ) -> Self {
        let [num_heads, num_kv_heads, head_dim] = heads;
        let blocks: usize = context_lens.iter().map(|len| len.div_ceil(16)).sum();
        // A prime number of blocks: multiplying by any shuffle visits each once.
        let num_blocks = [37, 101, 211].into_iter().find(|&prime| prime > blocks + 2).unwrap();
        let layout = KvLayout { num_layers: 1, num_blocks, num_heads, num_kv_heads, head_dim, block_size: 16, dtype };
        let mut next = 1;
        let block_tables: Vec<Vec<u32>> = context_lens
            .iter()
            .map(|len| {
                (0..len.div_ceil(16))
                    .map(|_| {
                        next += 1;
                        (next * shuffle % num_blocks) as u32
                    })
                    .collect()
            })
            .collect();
        let len = num_blocks * 16 * num_kv_heads * head_dim;
        let (mut key, mut value) = (vec![poison; len], vec![poison; len]);
        for (table, &context_len) in block_tables.iter().zip(context_lens) {
            for token in 0..context_len {
                for head in 0..num_kv_heads {
                    let block = table[token / 16] as usize;
                    let base = ((block * num_kv_heads + head) * 16 + token % 16) * head_dim;
                    key.splice(base..base + head_dim, rounded(dtype, &harness.random(head_dim)));
                    value.splice(base..base + head_dim, rounded(dtype, &harness.random(head_dim)));
                }
            }
        }
        let query = harness.random(context_lens.len() * num_heads * head_dim).iter().map(|q| q * 4.0).collect();
        let scale = Scale::plain(1.0 / (head_dim as f64).sqrt());
        Self { layout, query, key, value, block_tables, context_lens: context_lens.to_vec(), scale }
    }

    pub fn view(&self) -> CacheView<'_> {
        let KvLayout { num_kv_heads, head_dim, block_size, .. } = self.layout;
        CacheView { key: &self.key, value: &self.value, num_kv_heads, head_dim, block_size }
    }

    /// The scale as the kernels want it.
    pub fn attention(&self) -> Attention {
        let Scale { factor, soft_cap, window } = self.scale;
        Attention { rotary: None, window: window as u32, scale: factor as f32, soft_cap: soft_cap as f32 }
    }

    pub fn cache_buffers(&self, harness: &Harness) -> [engine::kernels::GpuBuffer; 2] {
        let head_dim = self.layout.head_dim;
        [&self.key, &self.value].map(|values| match self.layout.dtype {
            KvCacheDtype::F16 => {
                let halves: Vec<half::f16> = values.iter().map(|&x| half::f16::from_f32(x)).collect();
                harness.upload(&halves)
            }
            KvCacheDtype::Q8_0 => {
                let mut bytes: Vec<u8> = Vec::new();
                for head in values.chunks(16 * head_dim) {
                    let rows: Vec<_> = head.chunks(head_dim).map(reference::round_row).collect();
                    rows.iter().for_each(|(codes, _)| bytes.extend(codes.iter().map(|code| *code as u8)));
                    for (_, scales) in &rows {
                        let padding = [0u16].into_iter().take(scales.len() % 2);
                        bytes.extend(scales.iter().copied().chain(padding).flat_map(u16::to_le_bytes));
                    }
                }
                assert_eq!(bytes.len() as u64, self.layout.layer_bytes());
                harness.upload(&bytes)
            }
        })
    }

    /// Block tables as the kernels want them, and their stride.
    pub fn padded_tables(&self) -> (Vec<u32>, usize) {
        let stride = self.block_tables.iter().map(Vec::len).max().unwrap();
        let mut padded = Vec::new();
        for table in &self.block_tables {
            padded.extend(table.iter().copied().chain(std::iter::repeat(u32::MAX)).take(stride));
        }
        (padded, stride)
    }

    /// (sequence, split) of every work item, and the bounds of each sequence's.
    pub fn splits(&self, split: usize) -> (Vec<[u32; 2]>, Vec<usize>) {
        let (mut splits, mut starts) = (Vec::new(), vec![0]);
        for (sequence, len) in self.context_lens.iter().enumerate() {
            splits.extend((0..len.div_ceil(split)).map(|index| [sequence as u32, index as u32]));
            starts.push(splits.len());
        }
        (splits, starts)
    }

    pub fn reference(&self, split: usize) -> Vec<Partial> {
        let tables: Vec<&[u32]> = self.block_tables.iter().map(Vec::as_slice).collect();
        let bounds: Vec<(usize, usize, usize)> = self
            .splits(split)
            .0
            .iter()
            .map(|&[sequence, index]| {
                let context_len = self.context_lens[sequence as usize];
                let last = (index as usize * split + split).min(context_len);
                let first = (index as usize * split).max(self.scale.first_token(context_len - 1));
                (sequence as usize, first.min(last), last)
            })
            .collect();
        reference::paged_attention_decode(&self.query, self.view(), &tables, &bounds, self.layout.num_heads, self.scale)
    }

    pub fn run(&self, harness: &mut Harness, plan: &Plan) -> Output {
        let [key, value] = self.cache_buffers(harness);
        let (tables, stride) = self.padded_tables();
        let (splits, _) = self.splits(plan.split as usize);
        let lens: Vec<u32> = self.context_lens.iter().map(|&len| len as u32).collect();
        let (query, tables, lens) = (harness.upload(&self.query), harness.upload(&tables), harness.upload(&lens));
        let items = harness.upload(&splits);
        let out = harness.output(splits.len() * self.layout.num_heads * (self.layout.head_dim + 4));
        paged_attention_decode(
            &mut harness.encoder,
            plan,
            &query,
            &key,
            &value,
            &tables,
            &lens,
            &items,
            &out.buffer,
            &self.layout,
            &self.attention(),
            stride as u32,
            splits.len() as u32,
            0,
        )
        .unwrap();
        harness.encoder.submit().unwrap();
        out
    }
}

/// What becomes of values in the cache.
fn rounded(dtype: KvCacheDtype, values: &[f32]) -> Vec<f32> {
    match dtype {
        KvCacheDtype::F16 => values.iter().map(|&x| half::f16::from_f32(x).to_f32()).collect(),
        KvCacheDtype::Q8_0 => {
            let (codes, scales) = reference::round_row(values);
            let scale = |i: usize| half::f16::from_bits(scales[i / 32]).to_f32();
            codes.iter().enumerate().map(|(i, &code)| f32::from(code) * scale(i)).collect()
        }
    }
}

/// Heads, KV heads, width of a head, type of the cache: groups that a lane takes whole, in parts and one by one.
pub const HEADS: [([usize; 3], KvCacheDtype); 9] = [
    ([1, 1, 64], KvCacheDtype::F16),
    ([4, 1, 64], KvCacheDtype::F16),
    ([9, 3, 64], KvCacheDtype::F16),
    ([14, 2, 72], KvCacheDtype::F16),
    ([8, 1, 128], KvCacheDtype::F16),
    ([4, 1, 256], KvCacheDtype::F16),
    ([9, 3, 64], KvCacheDtype::Q8_0),
    ([2, 2, 96], KvCacheDtype::Q8_0),
    ([6, 1, 256], KvCacheDtype::Q8_0),
];

pub fn test(harness: &mut Harness) {
    let split = harness.plans[0].split as usize;
    let edges = [1, 15, 16, 17, split - 1, split, split + 1, 3 * split + 5];
    for (heads, dtype) in HEADS {
        for poison in POISONS {
            let mut case = Case::new(harness, heads, dtype, &edges, 5, poison);
            for (soft_cap, window) in [(0.0, 0), (50.0, 0), (0.0, 1), (0.0, 17), (20.0, split + 3)] {
                case.scale = Scale { soft_cap, window, ..case.scale };
                let label = format!("paged_attention_decode {heads:?} {dtype:?} {:?} poison {poison}", case.scale);
                check(harness, &case, &label);
            }
        }
    }
}

fn check(harness: &mut Harness, case: &Case, label: &str) {
    let split = harness.plans[0].split as usize;
    // What a split of no visible token leaves weighs nothing: its maximum is the lowest there is.
    let of = |partial: Partial| match partial.maximum == f64::NEG_INFINITY {
        true => [partial.weighted, vec![f64::from(-3.0e38f32), 0.0, 0.0, 0.0]].concat(),
        false => [partial.weighted, vec![partial.maximum, partial.sum, 0.0, 0.0]].concat(),
    };
    let expected: Vec<f64> = case.reference(split).into_iter().flat_map(of).collect();
    for plan in [0, 2].map(|index| harness.plans[index].clone()) {
        let out = case.run(harness, &plan);
        harness.compare(label, &out, &expected, ATTENTION);
        let again = case.run(harness, &plan);
        harness.same_bits(label, &out, &again);
    }
    // Heads that share a lane sum as heads alone do.
    let sharing = harness.plans[2].clone();
    let alone = Plan { max_heads: [1, 1], ..sharing.clone() };
    let (sharing, alone) = (case.run(harness, &sharing), case.run(harness, &alone));
    harness.same_bits(label, &sharing, &alone);
}
