//! How a request wants its tokens chosen and when it ends. Made valid at the HTTP edge; the engine never sees a bad one.

/// Parameters of one request.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// Only the k likeliest tokens; `None` is all.
    pub top_k: Option<usize>,
    /// Only the likeliest tokens whose probabilities reach this sum.
    pub top_p: f32,
    /// Only tokens at least this fraction as likely as the likeliest.
    pub min_p: f32,
    /// Seed of the counter-based randomness.
    pub seed: u64,
    /// Most tokens to generate, at least 1.
    pub max_tokens: usize,
    /// Texts that end the answer and are not part of it.
    pub stop: Vec<String>,
    /// Tokens that end the answer, beside the model's own.
    pub stop_token_ids: Vec<u32>,
    /// Whether to go on past the model's end-of-sequence tokens.
    pub ignore_eos: bool,
}

impl Default for SamplingParams {
    /// Greedy, 16 tokens.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
            max_tokens: 16,
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            ignore_eos: false,
        }
    }
}
