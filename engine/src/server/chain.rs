//! Where the chunks of a prompt's chain end in its tokens: text is looked for in the rendered prompt, in order.
//!
//! Called by the HTTP edge, which has text, chain and tokens in hand. Invariant: what cannot be found as it was sent ends the
//! list: a template that trims, moves or strips makes a prompt known for less, not for something else.

use protocol::PromptChain;

use crate::announcer::PromptChunk;
use crate::tokenizer::Tokenizer;

/// Shorter texts are found by chance, in words of the template.
const SHORT: usize = 4;

/// The chunks of a chain over `texts`, one a message, in the tokens of `rendered`. `num_leading` tokens stand before the text.
pub(super) fn located(
    chain: &PromptChain,
    texts: &[&str],
    rendered: &str,
    token_ids: &[u32],
    num_leading: usize,
    tokenizer: &Tokenizer,
) -> Vec<PromptChunk> {
    let mut bytes = Vec::new();
    let mut end = 0;
    let ends: Vec<usize> = token_ids[num_leading.min(token_ids.len())..]
        .iter()
        .map(|&id| {
            bytes.clear();
            tokenizer.append_bytes(id, &mut bytes);
            end += bytes.len();
            end
        })
        .collect();
    // A tokeniser that changes the text tells nothing of where it is.
    if end != rendered.len() {
        return Vec::new();
    }
    let mut starts = Vec::with_capacity(texts.len());
    let mut from = 0;
    for (index, text) in texts.iter().enumerate() {
        let Some(at) = rendered[from..].find(text) else { break };
        // Where another message stands before this one, this one depends on that.
        let gap = &rendered[from..from + at];
        if texts[index + 1..].iter().any(|other| (SHORT..=gap.len()).contains(&other.len()) && gap.contains(other)) {
            break;
        }
        starts.push(from + at);
        from += at + text.len();
    }
    let chunks = chain.chunks().iter().map_while(|chunk| {
        let end = starts.get(chunk.message as usize)? + chunk.end as usize;
        // A token that reaches beyond the chunk depends on what follows.
        let num_tokens = (num_leading + ends.partition_point(|&token_end| token_end <= end)) as u32;
        Some(PromptChunk { hash: chunk.hash, num_tokens })
    });
    // More chunks than tokens can only be messages without text, which cost memory and say nothing.
    chunks.take(token_ids.len()).collect()
}

/// The chunks of a prompt that is given as token ids.
pub(super) fn of_token_ids(chain: &PromptChain) -> Vec<PromptChunk> {
    chain.chunks().iter().map(|chunk| PromptChunk { hash: chunk.hash, num_tokens: chunk.end / 4 }).collect()
}

#[cfg(test)]
mod tests {
    use protocol::prompt_chain::{ChainKind, ChainRoot};
    use serde_json::Map;

    use super::*;

    fn chunks(texts: &[&str], rendered: &str) -> Vec<u32> {
        let mut chain = PromptChain::new(&ChainRoot::new(ChainKind::Chat, "m"));
        texts.iter().for_each(|text| chain.push_message("user", text, Map::new().iter()));
        let tokenizer = Tokenizer::bytes4();
        let token_ids = tokenizer.encode(rendered, false).unwrap();
        located(&chain, texts, rendered, &token_ids, 0, &tokenizer).iter().map(|chunk| chunk.num_tokens).collect()
    }

    #[test]
    fn chunks_end_at_the_last_token_within_them() {
        let long = "x".repeat(300);
        // Four bytes a token: 4 of the template, then 256 and 300 of the text.
        assert_eq!(chunks(&[&long], &format!("<u> {long}</u>")), [65, 76]);
        assert_eq!(chunks(&["abc", "d"], "<u> abc <u> d"), [1, 4], "a token that reaches beyond is not in it");
    }

    #[test]
    fn what_a_template_changes_ends_the_list() {
        let (a, b) = ("a".repeat(8), "b".repeat(8));
        assert_eq!(chunks(&[&a, " trimmed ", &b], &format!("{a}|trimmed|{b}")), [2]);
        assert_eq!(chunks(&[&a, &b], &format!("{b}{a}")), [0; 0], "the second stands before the first");
        assert_eq!(chunks(&["", &a], &format!("<s> {a}")), [0, 3]);
    }
}
