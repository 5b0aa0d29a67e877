//! `pagoda run ["prompt"]`: one answer, or a chat, in the terminal.

use std::io::{IsTerminal, Read, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use engine::engine_loop::EngineState;
use engine::event::{EngineEvent, RequestError};
use engine::sampling_params::SamplingParams;
use engine::sequence::EngineRequest;
use indicatif::{ProgressBar, ProgressStyle};
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use serde_json::{Value, json};

use crate::flags::{EngineFlags, LogFormat, ServerFlags};
use crate::model::{self, StartedModel};
use crate::settings::Settings;
use crate::{EXIT_DEVICE_FAILED, logging};

/// Arguments of `pagoda run`.
#[derive(Args)]
pub struct RunArgs {
    /// What to ask; without it, a chat (or standard input, where that is no terminal).
    prompt: Option<String>,
    /// What the model is told before the conversation.
    #[arg(long)]
    system: Option<String>,
    /// Most tokens of an answer.
    #[arg(long, default_value_t = 512)]
    max_tokens: usize,
    /// 0 always takes the likeliest token.
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Only the likeliest tokens whose probabilities reach this sum.
    #[arg(long, default_value_t = 1.0)]
    top_p: f32,
    /// Seed of the randomness.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    engine: EngineFlags,
}

/// Loads the model, then answers.
pub fn run(args: RunArgs) -> Result<ExitCode> {
    if !(args.temperature >= 0.0 && args.top_p > 0.0 && args.top_p <= 1.0) {
        bail!("--temperature must be at least 0 and --top-p above 0, at most 1");
    }
    let _telemetry = logging::start(LogFormat::Text, true, None)?;
    let settings = Settings::load(&args.engine, &ServerFlags::default())?;
    let started = model::start(&settings, None)?;
    let device = wait_until_loaded(&started)?;
    let mut chat = Chat { started, messages: Vec::new(), args };
    eprintln!("{} on {device}", chat.started.names[0]);
    if let Some(system) = &chat.args.system {
        chat.messages.push(json!({ "role": "system", "content": system }));
    }
    match chat.args.prompt.take() {
        Some(prompt) => chat.answer(&prompt),
        None if std::io::stdin().is_terminal() => chat.converse(),
        None => {
            let mut prompt = String::new();
            std::io::stdin().read_to_string(&mut prompt).context("reading standard input")?;
            chat.answer(prompt.trim_end())
        }
    }
}

/// Shows the loading progress; returns the device's name.
fn wait_until_loaded(started: &StartedModel) -> Result<String> {
    let style = ProgressStyle::with_template("loading {bar:30} {pos}/{len} tensors")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::new(1).with_style(style);
    loop {
        match started.engine.state() {
            EngineState::Loading(loaded, total) => {
                bar.set_length(total as u64);
                bar.set_position(loaded as u64);
            }
            EngineState::Ready(device) => {
                bar.finish_and_clear();
                return Ok(device);
            }
            EngineState::LoadFailed(reason) | EngineState::Failed(reason) => {
                bar.finish_and_clear();
                return Err(anyhow!(reason));
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

struct Chat {
    started: StartedModel,
    messages: Vec<Value>,
    args: RunArgs,
}

impl Chat {
    fn converse(&mut self) -> Result<ExitCode> {
        let mut editor = DefaultEditor::new()?;
        eprintln!("Ctrl-D ends the chat.");
        loop {
            match editor.readline("> ") {
                Ok(line) if line.trim().is_empty() => {}
                Ok(line) => {
                    drop(editor.add_history_entry(&line));
                    let code = self.answer(&line)?;
                    if code != ExitCode::SUCCESS {
                        return Ok(code);
                    }
                }
                Err(ReadlineError::Eof | ReadlineError::Interrupted) => return Ok(ExitCode::SUCCESS),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Streams one answer to standard output, its speed to standard error.
    fn answer(&mut self, prompt: &str) -> Result<ExitCode> {
        self.messages.push(json!({ "role": "user", "content": prompt }));
        let prompt = self.prompt(prompt)?;
        let prompt_tokens = prompt.len();
        let left = self.started.engine.max_model_len().saturating_sub(prompt_tokens).max(1);
        let params = SamplingParams {
            temperature: self.args.temperature,
            top_p: self.args.top_p,
            seed: self.args.seed,
            max_tokens: self.args.max_tokens.clamp(1, left),
            ..Default::default()
        };
        let started_at = Instant::now();
        let mut generation = self.started.engine.generate(EngineRequest { prompt, params, ..Default::default() })?;
        let (mut first_at, mut cached_tokens) = (None, 0);
        let mut answer = String::new();
        let mut out = std::io::stdout().lock();
        while let Some(event) = generation.blocking_next() {
            match event {
                // A terminal's answers begin at their beginning.
                EngineEvent::Resumed { .. } => {}
                EngineEvent::Prompt { num_cached_tokens, .. } => cached_tokens = num_cached_tokens,
                EngineEvent::Token { text, .. } => {
                    first_at.get_or_insert_with(Instant::now);
                    answer.push_str(&text);
                    out.write_all(text.as_bytes())?;
                    out.flush()?;
                }
                EngineEvent::Finished { text, num_generated, .. } => {
                    answer.push_str(&text);
                    writeln!(out, "{text}")?;
                    report((prompt_tokens, cached_tokens), num_generated, started_at, first_at);
                }
                EngineEvent::Failed(error @ RequestError::EngineFailed(_)) => {
                    eprintln!("error: {error}");
                    return Ok(ExitCode::from(EXIT_DEVICE_FAILED));
                }
                EngineEvent::Failed(error) => return Err(error.into()),
            }
        }
        self.messages.push(json!({ "role": "assistant", "content": answer }));
        Ok(ExitCode::SUCCESS)
    }

    /// The conversation by the chat template; the bare text for a model without one.
    fn prompt(&self, text: &str) -> Result<Vec<u32>> {
        let tokenizer = &self.started.tokenizer;
        Ok(match &self.started.chat_template {
            Some(template) => tokenizer.encode(&template.render(&Value::Array(self.messages.clone()), true)?, false)?,
            None => tokenizer.encode(text, true)?,
        })
    }
}

fn report(
    (prompt_tokens, cached): (usize, usize),
    num_generated: usize,
    started_at: Instant,
    first_at: Option<Instant>,
) {
    let Some(first_at) = first_at else { return };
    let prefill_s = (first_at - started_at).as_secs_f64();
    let decode_s = first_at.elapsed().as_secs_f64();
    let prefill = (prompt_tokens - cached) as f64 / prefill_s.max(1e-9);
    let decode = num_generated.saturating_sub(1) as f64 / decode_s.max(1e-9);
    let cached = if cached > 0 { format!(" ({cached} cached)") } else { String::new() };
    eprintln!(
        "[prompt {prompt_tokens} tokens{cached}, {prefill:.1} tok/s; answer {num_generated} tokens, {decode:.1} tok/s]"
    );
}
