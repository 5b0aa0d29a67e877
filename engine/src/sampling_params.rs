//! How a request wants its tokens chosen and when it ends. Made valid at the HTTP edge; the engine never sees a bad one.

/// Parameters of one request.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// Only the k likeliest tokens, and what ties with the last of them; `None` is all.
    pub top_k: Option<usize>,
    /// Only the likeliest tokens whose probabilities reach this sum, and what ties with the last of them.
    pub top_p: f32,
    /// Only tokens at least this fraction as likely as the likeliest.
    pub min_p: f32,
    /// Logits of tokens in prompt or answer are divided by it where positive, multiplied where negative; 1 is off.
    pub repetition_penalty: f32,
    /// Taken from the logits of tokens that the answer has; 0 is off.
    pub presence_penalty: f32,
    /// Taken from a token's logit each time that the answer has it; 0 is off.
    pub frequency_penalty: f32,
    /// (token, what is added to its logit).
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed of the counter-based randomness.
    pub seed: u64,
    /// Which of a request's answers this is: a counter of the randomness.
    pub choice: u64,
    /// Most tokens to generate, at least 1.
    pub max_tokens: usize,
    /// Tokens before which the answer cannot end by a token.
    pub min_tokens: usize,
    /// Texts that end the answer.
    pub stop: Vec<String>,
    /// Whether the text that ended the answer is part of it.
    pub include_stop: bool,
    /// Tokens that end the answer, beside the model's own.
    pub stop_token_ids: Vec<u32>,
    /// Whether to go on past the model's end-of-sequence tokens.
    pub ignore_eos: bool,
    /// Log probability of each token, and this many of the likeliest beside it.
    pub logprobs: Option<usize>,
    /// The same of each prompt token but the first. Such a request computes its whole prompt.
    pub prompt_logprobs: Option<usize>,
}

impl Default for SamplingParams {
    /// Greedy, 16 tokens.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
            choice: 0,
            max_tokens: 16,
            min_tokens: 0,
            stop: Vec::new(),
            include_stop: false,
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            logprobs: None,
            prompt_logprobs: None,
        }
    }
}

impl SamplingParams {
    /// Whether tokens have to be counted to compute the penalties.
    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }
}
