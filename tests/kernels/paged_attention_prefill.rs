//! `paged_attention_prefill.wgsl`: chunks of one query and of many, over cached blocks and at the start, behind decode
//! rows; a query's bits do not depend on its chunk.

use super::paged_attention_decode::{Case, HEADS, POISONS};
use crate::harness::{ATTENTION, Harness, Output};
use engine::kernels::{Plan, paged_attention_prefill};
use engine::kv::KvCacheDtype;
use shaders::reference::{self, Chunk, Scale};

/// (query_len, context_len) of each sequence.
const CHUNKS: [(usize, usize); 7] = [(1, 1), (1, 17), (15, 15), (16, 40), (33, 33), (65, 100), (31, 31)];
/// Rows before the first chunk, as decode rows are.
const FIRST_ROW: usize = 2;

pub fn test(harness: &mut Harness) {
    for (heads, dtype) in HEADS {
        for poison in POISONS {
            let context_lens: Vec<usize> = CHUNKS.iter().map(|(_, context_len)| *context_len).collect();
            let mut case = Case::new(harness, heads, dtype, &context_lens, 3, poison);
            let rows: usize = FIRST_ROW + CHUNKS.iter().map(|(query_len, _)| query_len).sum::<usize>();
            case.query = harness.random(rows * heads[0] * heads[2]);
            for (soft_cap, window) in [(0.0, 0), (50.0, 0), (0.0, 1), (0.0, 17), (20.0, 40)] {
                case.scale = Scale { soft_cap, window, ..case.scale };
                let label = format!("paged_attention_prefill {heads:?} {dtype:?} {:?} poison {poison}", case.scale);
                check(harness, &case, &label);
            }
        }
    }
    bits_do_not_depend_on_the_chunk(harness);
}

fn check(harness: &mut Harness, case: &Case, label: &str) {
    let plans = harness.plans.clone();
    let out = run(harness, &plans[0], case, &CHUNKS);
    let (num_heads, head_dim) = (case.layout.num_heads, case.layout.head_dim);
    let expected =
        reference::paged_attention_prefill(&case.query, case.view(), &chunks(case, &CHUNKS), num_heads, case.scale);
    // Rows of no chunk keep what was there: the comparison starts after them.
    let skip = FIRST_ROW * num_heads * head_dim;
    let got = harness.floats(label, &out);
    for (index, (&got, &wanted)) in got.iter().zip(&expected).enumerate().skip(skip) {
        let bound = ATTENTION.abs + ATTENTION.rel * wanted.abs();
        assert!((f64::from(got) - wanted).abs() <= bound, "{label}: element {index} is {got}, should be {wanted}");
    }
    assert!(got[..skip].iter().all(|value| *value == 0.0), "{label}: wrote a row of no chunk");
    harness.num_comparisons += 1;
    // Lanes and heads that share loads sum as those alone do.
    for plan in &plans[1..] {
        let again = run(harness, plan, case, &CHUNKS);
        harness.same_bits(label, &out, &again);
    }
}

fn chunks<'a>(case: &'a Case, lens: &[(usize, usize)]) -> Vec<Chunk<'a>> {
    let mut row = FIRST_ROW;
    lens.iter()
        .zip(&case.block_tables)
        .map(|(&(query_len, context_len), block_table)| {
            row += query_len;
            Chunk { row: row - query_len, query_len, context_len, block_table }
        })
        .collect()
}

fn run(harness: &mut Harness, plan: &Plan, case: &Case, lens: &[(usize, usize)]) -> Output {
    let [key, value] = case.cache_buffers(harness);
    let (tables, stride) = case.padded_tables();
    let (mut words, mut tiles, mut row) = (Vec::<[u32; 4]>::new(), Vec::<[u32; 2]>::new(), FIRST_ROW);
    for (sequence, &(query_len, context_len)) in lens.iter().enumerate() {
        words.push([row as u32, query_len as u32, context_len as u32, 0]);
        tiles.extend((0..query_len as u32).step_by(plan.query_tile as usize).map(|first| [sequence as u32, first]));
        row += query_len;
    }
    let (query, tables) = (harness.upload(&case.query), harness.upload(&tables));
    let (chunks, items) = (harness.upload(&words), harness.upload(&tiles));
    let out = harness.output_of(&vec![0.0; case.query.len()]);
    paged_attention_prefill(
        &mut harness.encoder,
        plan,
        &query,
        &key,
        &value,
        &tables,
        &chunks,
        &items,
        &out.buffer,
        &case.layout,
        &case.attention(),
        stride as u32,
        tiles.len() as u32,
        0,
    )
    .unwrap();
    harness.encoder.submit().unwrap();
    out
}

fn bits_do_not_depend_on_the_chunk(harness: &mut Harness) {
    let mut case = Case::new(harness, [9, 3, 64], KvCacheDtype::F16, &[50], 3, f32::NAN);
    let width = 9 * 64;
    let queries = harness.random(50 * width);
    let mut padded = vec![0.0; FIRST_ROW * width];
    padded.extend(&queries);
    case.query = padded;
    let plan = harness.plans[2].clone();
    let whole = run(harness, &plan, &case, &[(50, 50)]);
    let whole = harness.words("prefill whole", &whole)[FIRST_ROW * width..].to_vec();
    let mut start = 0;
    for len in [1, 30, 19] {
        let mut padded = vec![0.0; FIRST_ROW * width];
        padded.extend(&queries[start * width..(start + len) * width]);
        case.query = padded;
        let part = run(harness, &plan, &case, &[(len, start + len)]);
        let part = harness.words("prefill part", &part)[FIRST_ROW * width..].to_vec();
        assert_eq!(part, whole[start * width..(start + len) * width], "chunk of {len} at {start}");
        start += len;
        harness.num_comparisons += 1;
    }
}
