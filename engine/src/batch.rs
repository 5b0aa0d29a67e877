//! What one step feeds the model: the scheduler's batch as flat arrays.
//!
//! Made by `Engine::step` from the scheduled sequences, read by the ops. Invariant: sequences in decode come first, one
//! row each, so that row i of a decode is sequence i.

/// One sequence's part of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequenceInput {
    /// First row of its tokens.
    pub first_row: usize,
    /// Tokens computed this step.
    pub query_len: usize,
    /// Tokens visible to the last of them, itself included.
    pub context_len: usize,
    /// Physical block of each of its blocks.
    pub block_table: Vec<u32>,
}

/// One token's change of its logit: `penalised(logit + bias) − subtract`, where penalising divides a positive logit by
/// `repetition` and multiplies a negative one with it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adjustment {
    /// The token.
    pub token: u32,
    /// Added first.
    pub bias: f32,
    /// 1 is off.
    pub repetition: f32,
    /// Taken last.
    pub subtract: f32,
}

/// A draw from the tokens that the truncations leave, with `uniform` in [0, 1) as its only randomness.
///
/// Weights are exp((logit − largest) / temperature). First min-p leaves weights of at least `min_p`, then top-k those of at
/// least the k-th, then top-p those of at least the largest weight at which the sum of what is above reaches its part of
/// the whole. So ties stay or go together. The token is the first, by index, at which the sum of weights passes `uniform`
/// times their total.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(missing_docs, reason = "as in SamplingParams")]
pub struct Draw {
    pub temperature: f32,
    /// 0 is all.
    pub top_k: u32,
    pub top_p: f32,
    pub min_p: f32,
    pub uniform: f32,
}

/// How a logits row becomes a token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Choice {
    /// The largest logit; the lowest index of a tie.
    Greedy,
    /// By chance.
    Random(Draw),
    /// This one: a prompt token, whose log probability is wanted.
    Given(u32),
    /// None: the whole row is wanted.
    Logits,
}

/// What is wanted of one logits row.
#[derive(Clone, Debug, PartialEq)]
pub struct Selection {
    /// The row of the step.
    pub row: usize,
    /// How its token is chosen.
    pub choice: Choice,
    /// What changes before the choice; log probabilities are of the row as the model computed it.
    pub adjustments: Vec<Adjustment>,
    /// Log probability and rank of the token, and this many of the likeliest.
    pub num_logprobs: Option<usize>,
}

impl Selection {
    /// A choice and no more.
    pub fn plain(row: usize, choice: Choice) -> Self {
        Self { row, choice, adjustments: Vec::new(), num_logprobs: None }
    }
}

/// How likely a token was.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// 1 for the likeliest.
    pub rank: u32,
    /// The likeliest tokens with their log probabilities, largest first; ties by index.
    pub top: Vec<(u32, f32)>,
}

/// The answer to a [`Selection`].
#[derive(Clone, Debug, PartialEq)]
pub enum Selected {
    /// The token, and how likely it was where that was asked for.
    Token(u32, Option<TokenLogprob>),
    /// All logits.
    Logits(Vec<f32>),
    /// The row holds a NaN: its request fails.
    NotANumber,
}

/// One step's input, row by row.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelInput {
    /// Token of each row.
    pub token_ids: Vec<u32>,
    /// Position of each row in its sequence.
    pub positions: Vec<u32>,
    /// Cache slot of each row: block_id × block_size + offset.
    pub slot_mapping: Vec<u32>,
    /// Sequences, those in decode first.
    pub sequences: Vec<SequenceInput>,
    /// How many of them are in decode.
    pub num_decodes: usize,
    /// Rows whose logits are wanted, and what of them.
    pub selections: Vec<Selection>,
}

impl ModelInput {
    /// Rows of the step.
    pub fn num_rows(&self) -> usize {
        self.token_ids.len()
    }

    /// Appends the next `tokens` of a sequence, which start at position `start`; returns the row of the first.
    pub fn push(&mut self, tokens: &[u32], start: usize, block_table: &[u32], block_size: usize) -> usize {
        let first_row = self.num_rows();
        for (offset, &token) in tokens.iter().enumerate() {
            let position = start + offset;
            let block_id = block_table[position / block_size];
            self.token_ids.push(token);
            self.positions.push(position as u32);
            self.slot_mapping.push(block_id * block_size as u32 + (position % block_size) as u32);
        }
        let context_len = start + tokens.len();
        let block_table = block_table[..context_len.div_ceil(block_size)].to_vec();
        self.sequences.push(SequenceInput { first_row, query_len: tokens.len(), context_len, block_table });
        first_row
    }

    /// Wants this choice of the last row.
    pub fn select_last(&mut self, choice: Choice) {
        let row = self.num_rows() - 1;
        self.selections.push(Selection::plain(row, choice));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_find_their_slots_through_the_block_table() {
        let mut input = ModelInput::default();
        input.push(&[7], 16, &[4, 9], 16);
        input.select_last(Choice::Greedy);
        assert_eq!(input.push(&[1, 2, 3], 15, &[5, 0], 16), 1);
        assert_eq!(input.slot_mapping, vec![9 * 16, 5 * 16 + 15, 0, 1]);
        assert_eq!(input.positions, vec![16, 15, 16, 17]);
        assert_eq!(input.selections, vec![Selection::plain(0, Choice::Greedy)]);
        let last = &input.sequences[1];
        assert_eq!((last.first_row, last.query_len, last.context_len), (1, 3, 18));
    }
}
