//! One engine: requests in, text out, a step at a time.
//!
//! Driven by the engine loop on its own thread. A step is four moves: schedule, run, sample, finish.

use std::collections::HashMap;
use std::sync::Arc;

use crate::batch::ModelInput;
use crate::detokenizer::Detokenizer;
use crate::event::{EngineEvent, RequestError};
use crate::model_runner::StepRunner;
use crate::ops::DeviceError;
use crate::sampler;
use crate::sampling_params::SamplingParams;
use crate::scheduler::{Scheduled, Scheduler};
use crate::sequence::{FinishReason, RequestId, Sequence};
use crate::tokenizer::Tokenizer;

/// The engine's state.
pub struct Engine {
    runner: Box<dyn StepRunner>,
    scheduler: Scheduler,
    tokenizer: Arc<Tokenizer>,
    detokenizers: HashMap<RequestId, Detokenizer>,
    max_model_len: usize,
}

impl Engine {
    /// An idle engine.
    pub fn new(
        runner: Box<dyn StepRunner>,
        scheduler: Scheduler,
        tokenizer: Arc<Tokenizer>,
        max_model_len: usize,
    ) -> Self {
        Self { runner, scheduler, tokenizer, detokenizers: HashMap::new(), max_model_len }
    }

    /// Takes a request that was checked at the door.
    pub fn add(&mut self, id: RequestId, prompt: Vec<u32>, params: SamplingParams) {
        self.detokenizers.insert(id, Detokenizer::new(&params.stop));
        self.scheduler.add(Sequence::new(id, prompt, params));
    }

    /// Drops a request and frees its blocks.
    pub fn abort(&mut self, id: RequestId) {
        self.detokenizers.remove(&id);
        self.scheduler.remove(id);
    }

    /// The queues and the pool.
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// One step: returns what happened to each request that got a token or ended.
    ///
    /// # Errors
    /// When the device fails: all requests are lost.
    pub fn step(&mut self) -> Result<Vec<(RequestId, EngineEvent)>, DeviceError> {
        let batch = self.scheduler.schedule();
        if batch.is_empty() {
            return Ok(Vec::new());
        }
        let input = self.model_input(&batch);
        let selected = self.runner.run(&input)?;
        let mut selected = selected.into_iter();
        let mut events = Vec::new();
        for scheduled in batch {
            let Some(sequence) = self.scheduler.sequence_mut(scheduled.id) else { continue };
            sequence.num_computed_tokens += scheduled.num_tokens;
            if sequence.num_pending_tokens() > 0 {
                continue;
            }
            let position = sequence.tokens.len();
            let token = selected.next().and_then(|selected| sampler::sample(&selected, &sequence.params, position));
            match token {
                Some(token) => self.accept(scheduled.id, token, &mut events),
                None => {
                    self.abort(scheduled.id);
                    events.push((scheduled.id, EngineEvent::Failed(RequestError::NotANumber)));
                }
            }
        }
        Ok(events)
    }

    fn model_input(&mut self, batch: &[Scheduled]) -> ModelInput {
        let block_size = self.scheduler.blocks().block_size();
        let mut input = ModelInput {
            num_decodes: batch.iter().filter(|scheduled| scheduled.is_decode).count(),
            ..Default::default()
        };
        for scheduled in batch {
            let Some(sequence) = self.scheduler.sequence_mut(scheduled.id) else { continue };
            let start = sequence.num_computed_tokens;
            let tokens = &sequence.tokens[start..start + scheduled.num_tokens];
            let is_last = scheduled.num_tokens == sequence.num_pending_tokens();
            let selection = is_last.then(|| sampler::selection(&sequence.params));
            input.push(tokens, start, sequence.block_table.block_ids(), block_size, selection);
        }
        input
    }

    /// Appends a sampled token, decodes it, and ends the request where it must end.
    fn accept(&mut self, id: RequestId, token: u32, events: &mut Vec<(RequestId, EngineEvent)>) {
        let tokenizer = Arc::clone(&self.tokenizer);
        let max_model_len = self.max_model_len;
        let Some(detokenizer) = self.detokenizers.get_mut(&id) else { return };
        let Some(sequence) = self.scheduler.sequence_mut(id) else { return };
        sequence.tokens.push(token);
        let params = &sequence.params;
        let ends = params.stop_token_ids.contains(&token)
            || (!params.ignore_eos && tokenizer.eos_token_ids().contains(&token));
        let num_generated = sequence.num_generated();
        let is_full = num_generated >= params.max_tokens || sequence.tokens.len() >= max_model_len;
        let text = if ends { String::new() } else { detokenizer.push(&tokenizer, token) };
        let reason = if ends || detokenizer.is_stopped() {
            Some(FinishReason::Stop)
        } else {
            is_full.then_some(FinishReason::Length)
        };
        events.push((id, EngineEvent::Token { text, token_id: token }));
        if let Some(reason) = reason {
            let text = detokenizer.finish();
            self.abort(id);
            events.push((id, EngineEvent::Finished { reason, text, num_generated }));
        }
    }
}
