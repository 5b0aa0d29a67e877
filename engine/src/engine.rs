//! One engine: requests in, text out, a step at a time.
//!
//! Driven by the engine loop. A step is [`Engine::begin`] (schedule and lay out), the device's run, and [`Engine::finish`]
//! (sample, decode, end). No clock and no device in here: the loop passes durations and answers in.

use std::collections::HashMap;
use std::sync::Arc;

use crate::announcer::Announcement;
use crate::batch::{Choice, ModelInput, Selected, Selection, TokenLogprob};
use crate::detokenizer::Detokenizer;
use crate::event::{EngineEvent, RequestError};
use crate::kv::{BlockCopies, StagedBlock};
use crate::sampler;
use crate::sampling_params::SamplingParams;
use crate::scheduler::{Scheduled, Scheduler, Wanted};
use crate::sequence::{EngineRequest, FinishReason, RequestId, Sequence};
use crate::step_rate::StepRate;
use crate::tokenizer::Tokenizer;
use protocol::BlockHash;

/// Bounds of one engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EngineLimits {
    /// Longest sequence.
    pub max_model_len: usize,
    /// Seconds that a step may take while streams run.
    pub max_step_s: f64,
}

impl EngineLimits {
    /// The text that a token adds to an answer of `lens.0` tokens with it, to a prompt of `lens.1`, and whether it ends it.
    fn decoded(
        &self,
        tokenizer: &Tokenizer,
        params: &SamplingParams,
        detokenizer: &mut Detokenizer,
        token: u32,
        lens: (usize, usize),
    ) -> (String, Option<FinishReason>) {
        let is_early = lens.0 <= params.min_tokens;
        let ends = sampler::ends(params, token, tokenizer.eos_token_ids());
        let is_full = lens.0 >= params.max_tokens || lens.0 + lens.1 >= self.max_model_len;
        let text = if ends { String::new() } else { detokenizer.push(tokenizer, token, !is_early) };
        let reason = if ends || detokenizer.is_stopped() {
            Some(FinishReason::Stop)
        } else {
            is_full.then_some(FinishReason::Length)
        };
        (text, reason)
    }
}

/// The engine's state.
pub struct Engine {
    scheduler: Scheduler,
    tokenizer: Arc<Tokenizer>,
    answers: HashMap<RequestId, Answer>,
    limits: EngineLimits,
    rate: StepRate,
    wanted: Vec<Wanted>,
}

/// An answer's text under way.
struct Answer {
    detokenizer: Detokenizer,
    prompt_logprobs: Vec<(u32, TokenLogprob)>,
    has_tokens: bool,
}

/// A step between its two halves.
#[derive(Clone, Debug, Default)]
pub struct Step {
    /// What the device computes.
    pub input: ModelInput,
    /// Answers that start or resume in it.
    pub admitted: Vec<RequestId>,
    /// Answers that lost their blocks to it.
    pub preempted: Vec<RequestId>,
    /// Blocks that leave and arrive before it computes. A step may hold nothing else.
    pub copies: BlockCopies,
    shares: Vec<Share>,
}

#[derive(Clone, Copy, Debug)]
struct Share {
    scheduled: Scheduled,
    num_prompt_logprobs: usize,
    samples: bool,
}

impl Step {
    /// Sequences that take one token.
    pub fn num_decodes(&self) -> usize {
        self.input.num_decodes
    }

    /// Tokens of the others.
    pub fn num_prefill_tokens(&self) -> usize {
        self.input.num_rows() - self.input.num_decodes
    }
}

impl Engine {
    /// An idle engine.
    pub fn new(scheduler: Scheduler, tokenizer: Arc<Tokenizer>, limits: EngineLimits) -> Self {
        Self { scheduler, tokenizer, answers: HashMap::new(), limits, rate: StepRate::default(), wanted: Vec::new() }
    }

    /// Takes a request that was checked at the door; what is to be told of it at once. One that another engine began goes on
    /// from its tokens, which are replayed: penalties, stop texts and incomplete characters are as they were there.
    pub fn add(&mut self, id: RequestId, request: EngineRequest) -> Vec<EngineEvent> {
        let params = &request.params;
        let mut detokenizer = Detokenizer::new(&params.stop, params.include_stop);
        let mut events = Vec::new();
        if !request.generated.is_empty() {
            let (text, num_generated, reason) = self.replay(&request, &mut detokenizer);
            events.push(EngineEvent::Resumed { text, num_generated });
            if let Some(reason) = reason {
                let text = detokenizer.finish();
                events.push(EngineEvent::Finished { reason, text, num_generated });
                return events;
            }
        }
        self.answers.insert(id, Answer { detokenizer, prompt_logprobs: Vec::new(), has_tokens: false });
        let block_size = self.scheduler.blocks().block_size();
        self.scheduler.add(Sequence::new(id, request, block_size));
        events
    }

    /// The text of a request's tokens so far, how many those are up to an end, and whether there is one.
    fn replay(&self, request: &EngineRequest, detokenizer: &mut Detokenizer) -> (String, usize, Option<FinishReason>) {
        let EngineRequest { prompt, params, generated, .. } = request;
        let mut text = String::new();
        for (&token, num_generated) in generated.iter().zip(1..) {
            let (part, reason) =
                self.limits.decoded(&self.tokenizer, params, detokenizer, token, (num_generated, prompt.len()));
            text.push_str(&part);
            if reason.is_some() {
                return (text, num_generated, reason);
            }
        }
        (text, generated.len(), None)
    }

    /// From now on what is held of prompt chains is told by [`Self::take_changes`].
    pub fn keep_changes(&mut self) {
        self.scheduler.keep_changes();
    }

    /// Names that blocks have lost since this was last called, then chunks that are held since then.
    pub fn take_changes(&mut self) -> (Vec<BlockHash>, Vec<Announcement>) {
        self.scheduler.take_changes()
    }

    /// Drops a request and frees its blocks.
    pub fn abort(&mut self, id: RequestId) {
        self.answers.remove(&id);
        self.scheduler.remove(id);
    }

    /// The queues and the pool.
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// How fast steps have been.
    pub fn rate(&self) -> StepRate {
        self.rate
    }

    /// Lays out the next step; `None` where there is nothing to do.
    pub fn begin(&mut self) -> Option<Step> {
        let mut step = Step::default();
        while !self.scheduler.is_idle() {
            let budget = self.rate.prefill_budget(self.scheduler.num_decoding(), self.limits.max_step_s);
            let schedule = self.scheduler.schedule(budget);
            let has_preempted = !schedule.preempted.is_empty();
            step.preempted.extend(schedule.preempted);
            step.admitted.extend(schedule.admitted);
            step.copies.stores.extend(schedule.copies.stores);
            step.copies.loads.extend(schedule.copies.loads);
            self.wanted.extend(schedule.wanted);
            if !schedule.batch.is_empty() || !step.copies.is_empty() {
                step.input.num_decodes = schedule.batch.iter().filter(|scheduled| scheduled.is_decode).count();
                schedule.batch.into_iter().for_each(|scheduled| self.lay_out(scheduled, &mut step));
                return Some(step);
            }
            if !has_preempted {
                return None;
            }
        }
        None
    }

    /// What the tiers are to be asked for since this was last called.
    pub fn take_wanted(&mut self) -> Vec<Wanted> {
        std::mem::take(&mut self.wanted)
    }

    /// Hands a request what arrived for it from the tiers; `is_last` lets it go on.
    pub fn stage(&mut self, id: RequestId, blocks: Vec<StagedBlock>, is_last: bool) {
        self.scheduler.stage(id, blocks, is_last);
    }

    /// Blocks that go down while nothing runs.
    pub fn idle_copies(&mut self) -> BlockCopies {
        self.scheduler.idle_copies()
    }

    /// The next blocks of a drain, the most valuable first; empty when there are no more.
    pub fn drain_copies(&mut self) -> BlockCopies {
        self.scheduler.drain_copies()
    }

    fn lay_out(&mut self, scheduled: Scheduled, step: &mut Step) {
        let block_size = self.scheduler.blocks().block_size();
        let Some(sequence) = self.scheduler.running_mut(scheduled.place) else { return };
        let start = sequence.num_computed_tokens;
        let end = start + scheduled.num_tokens;
        let input = &mut step.input;
        let first_row = input.push(&sequence.tokens[start..end], start, sequence.block_table.block_ids(), block_size);
        let mut num_prompt_logprobs = 0;
        if sequence.wants_prompt_logprobs() {
            for position in start.max(sequence.num_prompt_logprobs)..end.min(sequence.prompt_len - 1) {
                let choice = Choice::Given(sequence.tokens[position + 1]);
                let num_logprobs = sequence.params.prompt_logprobs;
                let row = first_row + position - start;
                input.selections.push(Selection { num_logprobs, ..Selection::plain(row, choice) });
                num_prompt_logprobs += 1;
            }
        }
        let samples = end == sequence.tokens.len();
        if samples {
            let last_row = first_row + scheduled.num_tokens - 1;
            input.selections.push(sampler::selection(sequence, last_row, self.tokenizer.eos_token_ids()));
        }
        step.shares.push(Share { scheduled, num_prompt_logprobs, samples });
    }

    /// Notes that a step took so many seconds.
    pub fn note_rate(&mut self, step: &Step, seconds: f64) {
        self.rate.observe(step.num_decodes(), step.num_prefill_tokens(), seconds);
    }

    /// Takes the device's answers to a step: what happened to each request that got a token or ended.
    pub fn finish(&mut self, step: Step, selected: Vec<Selected>) -> Vec<(RequestId, EngineEvent)> {
        let mut selected = selected.into_iter();
        let mut events = Vec::new();
        for share in step.shares {
            let id = share.scheduled.id;
            let prompt: Vec<Selected> = selected.by_ref().take(share.num_prompt_logprobs).collect();
            let sampled = if share.samples { selected.next() } else { None };
            let Some(sequence) = self.scheduler.computed(&share.scheduled) else { continue };
            sequence.num_prompt_logprobs += prompt.len();
            let is_nan = |selected: &Selected| matches!(selected, Selected::NotANumber | Selected::Logits(_));
            if prompt.iter().chain(&sampled).any(is_nan) {
                self.answers.remove(&id);
                self.scheduler.remove_poisoned(id);
                events.push((id, EngineEvent::Failed(RequestError::NotANumber)));
                continue;
            }
            self.keep_prompt_logprobs(id, prompt);
            if let Some(Selected::Token(token, logprob)) = sampled {
                self.accept(&share.scheduled, token, logprob, &mut events);
            }
        }
        events
    }

    fn keep_prompt_logprobs(&mut self, id: RequestId, prompt: Vec<Selected>) {
        let Some(answer) = self.answers.get_mut(&id) else { return };
        for selected in prompt {
            if let Selected::Token(token, Some(logprob)) = selected {
                answer.prompt_logprobs.push((token, logprob));
            }
        }
    }

    /// Appends a sampled token, decodes it, and ends the request where it must end.
    fn accept(
        &mut self,
        scheduled: &Scheduled,
        token: u32,
        logprob: Option<TokenLogprob>,
        events: &mut Vec<(RequestId, EngineEvent)>,
    ) {
        let id = scheduled.id;
        let Some(answer) = self.answers.get_mut(&id) else { return };
        let Some(sequence) = self.scheduler.running_mut(scheduled.place) else { return };
        if !answer.has_tokens {
            answer.has_tokens = true;
            let num_cached_tokens = sequence.num_cached_tokens.unwrap_or(0);
            let logprobs = std::mem::take(&mut answer.prompt_logprobs);
            events.push((id, EngineEvent::Prompt { num_cached_tokens, logprobs }));
        }
        sequence.push(token);
        let (num_generated, prompt_len) = (sequence.num_generated(), sequence.prompt_len);
        let detokenizer = &mut answer.detokenizer;
        let lens = (num_generated, prompt_len);
        let (text, reason) = self.limits.decoded(&self.tokenizer, &sequence.params, detokenizer, token, lens);
        events.push((id, EngineEvent::Token { text, token_id: token, logprob }));
        if let Some(reason) = reason {
            let text = answer.detokenizer.finish();
            self.abort(id);
            events.push((id, EngineEvent::Finished { reason, text, num_generated }));
        }
    }
}
