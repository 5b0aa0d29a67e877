//! Steps of a simulated device: how long they take, and which tokens they give.
//!
//! Driven by the engine loop, which sleeps for [`StepRunner::latency`]. Knows no clock.

use std::time::Duration;

use bytes::Bytes;
use protocol::NumericsClass;

use super::profile::SimProfile;
use crate::batch::{Choice, ModelInput, Selected, SequenceInput, TokenLogprob};
use crate::kv::{BLOCK_SIZE, BlockId, Load, PayloadShape};
use crate::model_runner::StepRunner;
use crate::ops::DeviceError;
use crate::sampler::mix;
use crate::tokenizer::Tokenizer;

/// Before the first token of a block, and before the first block.
const ROOT: u64 = 0x5067_6f64_6153_494d;
/// Far beyond any test's patience: a step that never ends.
const FOREVER: Duration = Duration::from_secs(60 * 60 * 24 * 365);
/// Bytes of a block outside the device; its transfer is charged at the profile's size.
const PAYLOAD_BYTES: usize = 64;
/// Letters of the answers: four a token where tokens are four bytes.
const LETTERS: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz .,-!?";

/// A simulated device.
pub struct SimRunner {
    profile: SimProfile,
    vocab_size: usize,
    /// Ends an answer.
    eos: Option<u32>,
    /// By slot, the hash of its block's tokens up to the one that it holds: the simulated KV state.
    cache: Vec<u64>,
    num_tokens: u64,
    num_steps: u64,
    outgoing: Vec<Bytes>,
    /// Bytes that a real device would have moved and nobody has waited for.
    moved_bytes: f64,
}

impl SimRunner {
    /// A device with an empty cache, whose tokens are the tokeniser's.
    pub fn new(profile: SimProfile, tokenizer: &Tokenizer) -> Self {
        let cache = vec![0; profile.kv_blocks * BLOCK_SIZE];
        let (vocab_size, eos) = (tokenizer.vocab_size(), tokenizer.eos_token_ids().first().copied());
        Self { profile, vocab_size, eos, cache, num_tokens: 0, num_steps: 0, outgoing: Vec::new(), moved_bytes: 0.0 }
    }

    fn has_passed(&self, tokens: Option<u64>) -> bool {
        tokens.is_some_and(|tokens| self.num_tokens >= tokens)
    }

    /// Writes a sequence's tokens into the cache, each after the one before it in its block.
    fn compute(&mut self, input: &ModelInput, sequence: &SequenceInput) {
        let rows = sequence.first_row..sequence.first_row + sequence.query_len;
        for row in rows {
            let position = input.positions[row] as usize;
            let starts_block = position.is_multiple_of(BLOCK_SIZE);
            let before = if starts_block { ROOT } else { self.cache[slot(sequence, position - 1)] };
            self.cache[slot(sequence, position)] = mix(before ^ mix(u64::from(input.token_ids[row]) + 1));
        }
    }

    /// What the cache holds of a sequence up to `position`, as its block table leads to it.
    fn state(&self, sequence: &SequenceInput, position: usize) -> u64 {
        let ends = (0..position / BLOCK_SIZE).map(|block| block * BLOCK_SIZE + BLOCK_SIZE - 1);
        ends.chain([position]).fold(ROOT, |state, end| mix(state ^ self.cache[slot(sequence, end)]))
    }

    /// The token after `position`: a hash of all before it, the seed (by `uniform`, which is a function of it) and the
    /// position.
    fn token(&self, state: u64, position: usize, choice: Choice) -> u32 {
        let seed = match choice {
            Choice::Given(token) => return token,
            Choice::Random(draw) => u64::from(draw.uniform.to_bits()),
            Choice::Greedy | Choice::Logits => 0,
        };
        let hash = mix(state ^ mix(seed) ^ mix(position as u64));
        let ends = self.profile.mean_output_tokens;
        if let Some(eos) = self.eos.filter(|_| ends > 0 && (hash >> 32).is_multiple_of(u64::from(ends))) {
            return eos;
        }
        if self.vocab_size < 1 << 32 {
            return (hash % self.vocab_size as u64) as u32;
        }
        let letter = |index: u32| LETTERS[(hash >> (5 * index)) as usize % LETTERS.len()];
        u32::from_le_bytes([letter(0), letter(1), letter(2), letter(3)])
    }
}

/// A full block's state: the hash of its tokens, which is all that is read of it, and seven words made of it.
fn payload(state: u64) -> Bytes {
    let words = (0..8).scan(state, |word, _| Some(std::mem::replace(word, mix(*word + 1))));
    words.flat_map(u64::to_le_bytes).collect()
}

fn slot(sequence: &SequenceInput, position: usize) -> usize {
    sequence.block_table[position / BLOCK_SIZE] as usize * BLOCK_SIZE + position % BLOCK_SIZE
}

impl StepRunner for SimRunner {
    fn run(&mut self, input: &ModelInput) -> Result<Vec<Selected>, DeviceError> {
        self.num_tokens += input.num_rows() as u64;
        if let Some(tokens) = self.profile.faults.die_after_tokens.filter(|tokens| self.num_tokens > *tokens) {
            return Err(DeviceError::Lost(format!("simulated, after {tokens} tokens")));
        }
        // Sequences that share blocks read them, and none writes what another reads.
        input.sequences.iter().for_each(|sequence| self.compute(input, sequence));
        let mut sequences = input.sequences.iter();
        let mut current = sequences.next();
        let mut answers = Vec::with_capacity(input.selections.len());
        for selection in &input.selections {
            while current.is_some_and(|s| s.first_row + s.query_len <= selection.row) {
                current = sequences.next();
            }
            let Some(sequence) = current else { break };
            let position = input.positions[selection.row] as usize;
            let token = self.token(self.state(sequence, position), position, selection.choice);
            let logprob = selection.num_logprobs.map(|wanted| TokenLogprob {
                logprob: 0.0,
                rank: 1,
                top: if wanted > 0 { vec![(token, 0.0)] } else { Vec::new() },
            });
            answers.push(Selected::Token(token, logprob));
        }
        Ok(answers)
    }

    fn copy_blocks(&mut self, stores: &[BlockId], loads: &[Load]) -> Result<(), DeviceError> {
        let end = |block_id: BlockId| block_id as usize * BLOCK_SIZE + BLOCK_SIZE - 1;
        self.outgoing = stores.iter().map(|&block_id| payload(self.cache[end(block_id)])).collect();
        for Load { block_id, payload } in loads {
            let mut state = [0; 8];
            state.copy_from_slice(&payload[..8]);
            self.cache[end(*block_id)] = u64::from_le_bytes(state);
        }
        let block_bytes = self.profile.kv_bytes_per_token * BLOCK_SIZE as f64;
        self.moved_bytes += (stores.len() + loads.len()) as f64 * block_bytes;
        Ok(())
    }

    fn copied_out(&mut self) -> Result<Vec<Bytes>, DeviceError> {
        Ok(std::mem::take(&mut self.outgoing))
    }

    fn payload(&self) -> PayloadShape {
        PayloadShape::opaque(PAYLOAD_BYTES)
    }

    fn numerics(&self) -> NumericsClass {
        NumericsClass::new("sim")
    }

    fn copy_latency(&mut self) -> Option<Duration> {
        let seconds = std::mem::take(&mut self.moved_bytes) / (self.profile.transfer_gb_per_s * 1e9);
        (seconds > 0.0).then(|| Duration::from_secs_f64(seconds))
    }

    fn latency(&mut self, input: &ModelInput) -> Option<Duration> {
        let profile = &self.profile;
        if self.has_passed(profile.faults.hang_after_tokens) {
            return Some(FOREVER);
        }
        let prefill = input.num_rows() - input.num_decodes;
        let mut ms = profile.step_ms + prefill as f64 * profile.prefill_ms_per_token;
        if input.num_decodes > 0 {
            ms += profile.decode_ms + input.num_decodes as f64 * profile.decode_ms_per_sequence;
        }
        if self.has_passed(profile.faults.slow_after_tokens) {
            ms *= profile.faults.slow_factor.unwrap_or(10.0);
        }
        let uniform = crate::sampler::uniform(profile.seed, 0, self.num_steps);
        ms *= 1.0 + profile.jitter * (2.0 * f64::from(uniform) - 1.0);
        self.num_steps += 1;
        Some(Duration::from_secs_f64(ms / 1e3))
    }

    fn refuses(&self) -> bool {
        self.has_passed(self.profile.faults.refuse_after_tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runner(changes: impl Fn(&mut SimProfile)) -> SimRunner {
        let mut profile = SimProfile::load("laptop").unwrap();
        changes(&mut profile);
        SimRunner::new(profile, &Tokenizer::bytes4())
    }

    fn next(runner: &mut SimRunner, tokens: &[u32], start: usize, blocks: &[u32]) -> u32 {
        let mut input = ModelInput::default();
        input.push(tokens, start, blocks, BLOCK_SIZE);
        input.select_last(Choice::Greedy);
        match runner.run(&input).unwrap()[0] {
            Selected::Token(token, _) => token,
            ref other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_token_depends_on_all_before_it_wherever_they_lie() {
        let tokens: Vec<u32> = (0..40).collect();
        let whole = next(&mut runner(|_| {}), &tokens, 0, &[0, 1, 2]);
        let mut parts = runner(|_| {});
        next(&mut parts, &tokens[..20], 0, &[9, 4, 7]);
        assert_eq!(next(&mut parts, &tokens[20..], 20, &[9, 4, 7]), whole);
        next(&mut parts, &tokens[1..17], 0, &[3]);
        assert_ne!(next(&mut parts, &tokens[20..], 20, &[3, 4, 7]), whole, "a wrong block changes the text");
        let mut doubled = tokens.clone();
        doubled.insert(5, 4);
        assert_ne!(next(&mut runner(|_| {}), &doubled, 0, &[0, 1, 2]), whole);
    }

    #[test]
    fn latency_is_the_profile_s_and_jitter_repeats() {
        let mut input = ModelInput { num_decodes: 1, ..Default::default() };
        input.push(&[1], 0, &[0], BLOCK_SIZE);
        input.push(&[1; 10], 0, &[1], BLOCK_SIZE);
        let ms = |runner: &mut SimRunner| runner.latency(&input).unwrap().as_secs_f64() * 1e3;
        assert!((ms(&mut runner(|_| {})) - (2.0 + 45.0 + 0.6 + 12.0)).abs() < 1e-6);
        let mut varied = [runner(|p| p.jitter = 0.2), runner(|p| p.jitter = 0.2)];
        let [a, b] = [0, 1].map(|index| (0..5).map(|_| ms(&mut varied[index])).collect::<Vec<_>>());
        assert!(a == b && a[0] != a[1] && a.iter().all(|ms| (ms / 59.6 - 1.0).abs() <= 0.2), "{a:?}");
    }

    #[test]
    fn faults_come_after_their_tokens() {
        let mut input = ModelInput::default();
        input.push(&[1; 10], 0, &[1], BLOCK_SIZE);
        let mut dying = runner(|p| p.faults.die_after_tokens = Some(15));
        assert!(dying.run(&input).is_ok() && dying.run(&input).is_err());
        let mut hanging = runner(|p| p.faults.hang_after_tokens = Some(10));
        assert!(hanging.latency(&input).unwrap() < FOREVER);
        hanging.run(&input).unwrap();
        assert_eq!(hanging.latency(&input), Some(FOREVER));
        let mut refusing = runner(|p| p.faults.refuse_after_tokens = Some(10));
        assert!(!refusing.refuses());
        refusing.run(&input).unwrap();
        assert!(refusing.refuses());
        let mut slow = runner(|p| p.faults.slow_after_tokens = Some(0));
        assert!((slow.latency(&input).unwrap().as_secs_f64() - 0.14).abs() < 1e-9);
    }
}
