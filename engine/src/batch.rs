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

/// What is wanted of one logits row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selection {
    /// The index of the largest logit.
    Argmax,
    /// The k largest logits with their indices.
    TopK(usize),
    /// The whole row.
    Logits,
}

/// The answer to a [`Selection`].
#[derive(Clone, Debug, PartialEq)]
pub enum Selected {
    /// The largest logit's index.
    Token(u32),
    /// (index, logit), largest first; ties by index.
    TopK(Vec<(u32, f32)>),
    /// All logits.
    Logits(Vec<f32>),
    /// The row holds a NaN: its request fails.
    NotANumber,
}

/// One step's input, row by row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
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
    pub selections: Vec<(usize, Selection)>,
}

impl ModelInput {
    /// Rows of the step.
    pub fn num_rows(&self) -> usize {
        self.token_ids.len()
    }

    /// Appends the next `tokens` of a sequence, which start at position `start`; `selection` is for the last of them.
    pub fn push(
        &mut self,
        tokens: &[u32],
        start: usize,
        block_table: &[u32],
        block_size: usize,
        selection: Option<Selection>,
    ) {
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
        if let Some(selection) = selection {
            self.selections.push((self.num_rows() - 1, selection));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_find_their_slots_through_the_block_table() {
        let mut input = ModelInput::default();
        input.push(&[7], 16, &[4, 9], 16, Some(Selection::Argmax));
        input.push(&[1, 2, 3], 15, &[5, 0], 16, None);
        assert_eq!(input.slot_mapping, vec![9 * 16, 5 * 16 + 15, 0, 1]);
        assert_eq!(input.positions, vec![16, 15, 16, 17]);
        assert_eq!(input.selections, vec![(0, Selection::Argmax)]);
        let last = &input.sequences[1];
        assert_eq!((last.first_row, last.query_len, last.context_len), (1, 3, 18));
    }
}
