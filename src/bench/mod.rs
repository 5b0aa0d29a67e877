//! `pagoda bench engine`: how fast a model runs on a device, without a server: prefill by prompt length, decode by sequences at
//! once, what the device gives at most, and where the time goes, kernel by kernel; beside a peer, where one is named.

mod peer;

use std::path::PathBuf;
use std::process::ExitCode;
use std::thread::available_parallelism;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use engine::batch::{Choice, ModelInput};
use engine::kernels::KernelTimes;
use engine::kv::BLOCK_SIZE;
use engine::model::ModelConfig;
use engine::model_file::ModelFile;
use engine::model_runner::{self, StepRunner};
use engine::ops::ceiling::MANY_TOKENS;
use engine::tokenizer::Tokenizer;
use serde::Serialize;

use crate::flags::{EngineFlags, LogFormat, ServerFlags};
use crate::settings::Settings;
use crate::{logging, model};
use peer::{Peer, PeerSettings};

/// Arguments of `pagoda bench`.
#[derive(Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Measure a model on a device.
    Engine(Box<EngineBench>),
}

/// Arguments of `pagoda bench engine`.
#[derive(Args)]
struct EngineBench {
    #[command(flatten)]
    engine: EngineFlags,
    /// Prompt lengths, in tokens.
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_values_t = [16, 128, 512])]
    prompt_lens: Vec<usize>,
    /// Sequences that are decoded at once.
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_values_t = [1, 4, 8])]
    batch_sizes: Vec<usize>,
    /// Tokens that each sequence is decoded by.
    #[arg(long, value_name = "N", default_value_t = 32)]
    decode_tokens: usize,
    /// Rounds; the median counts.
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,
    /// llama.cpp's server, measured in the same rounds on the same model.
    #[arg(long, value_name = "PROGRAM")]
    peer: Option<PathBuf>,
    /// More arguments for the peer, separated by spaces.
    #[arg(long, value_name = "ARGUMENTS", requires = "peer", allow_hyphen_values = true, value_delimiter = ' ')]
    peer_args: Vec<String>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Tokens that a sequence has before it is decoded.
const DECODE_PROMPT: usize = 16;

/// Tokens of a sequence of the peer beyond the longest that is measured.
const PEER_MARGIN: usize = 16;

#[derive(Serialize)]
struct Report {
    model: String,
    device: String,
    weights_bytes: u64,
    load_s: f64,
    copy_gb_per_s: Option<f64>,
    dot_gmac_per_s: Option<[f64; 2]>,
    prefill: Vec<Speed>,
    decode: Vec<Speed>,
    dispatches_a_decode_step: u64,
    kernels_of_a_decode_step: Vec<Kernel>,
    kernels_of_a_prefill: Vec<Kernel>,
}

/// Of so many tokens, or sequences, at once.
#[derive(Serialize)]
struct Speed {
    count: usize,
    tokens_per_s: f64,
    /// Weights that were read, a second.
    gb_per_s: f64,
    /// Multiply-adds with weights, a second.
    gmac_per_s: f64,
    /// The peer's, where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    peer_tokens_per_s: Option<f64>,
}

#[derive(Serialize)]
struct Kernel {
    name: String,
    dispatches: u64,
    ms: f64,
    share: f64,
    gmac_per_s: f64,
}

/// Measures.
pub fn bench(args: BenchArgs) -> Result<ExitCode> {
    let What::Engine(args) = args.what;
    let _telemetry = logging::start(LogFormat::Text, true, None)?;
    if args.rounds == 0 || args.decode_tokens == 0 || args.prompt_lens.iter().chain(&args.batch_sizes).any(|&n| n == 0)
    {
        bail!("--rounds, --decode-tokens, --prompt-lens and --batch-sizes: each at least 1");
    }
    let settings = Settings::load(&args.engine, &ServerFlags::default())?;
    let (path, name) = model::find(settings.model.as_deref())?;
    let file = ModelFile::open(&path)?;
    let tokenizer = Tokenizer::of(&file)?;
    let mut config = settings.engine(path.clone(), &name)?;
    config.max_num_seqs = config.max_num_seqs.max(args.batch_sizes.iter().copied().max().unwrap_or(1));
    let (opened, sizes) = model_runner::prepare(&file, &tokenizer, &config)?;
    let longest = args.prompt_lens.iter().copied().max().unwrap_or(0).max(DECODE_PROMPT + args.decode_tokens + 1);
    if longest > sizes.max_model_len {
        bail!("{longest} tokens: the longest sequence has {} here; see --max-model-len", sizes.max_model_len);
    }
    let started = Instant::now();
    let mut loaded = model_runner::load(opened, &file, &sizes, &config, &mut |_, _| {})?;
    let load_s = started.elapsed().as_secs_f64();
    let start_peer = |program| {
        if path.is_dir() {
            bail!("--peer reads GGUF files, {} is a directory", path.display());
        }
        Peer::start(&PeerSettings {
            program,
            arguments: &args.peer_args,
            model: path.clone(),
            device: &config.device,
            threads: settings.threads.unwrap_or_else(|| available_parallelism().map_or(1, usize::from)),
            // It counts what it generates, too.
            context: longest + PEER_MARGIN,
            parallel: args.batch_sizes.iter().copied().max().unwrap_or(1),
        })
    };
    let peer = args.peer.as_deref().map(start_peer).transpose()?;
    let mut bench = Bench {
        runner: loaded.runner.as_mut(),
        num_blocks: sizes.layout.num_blocks,
        max_rows: config.max_num_batched_tokens,
        vocab_size: tokenizer.vocab_size().min(sizes.model.vocab_size),
        weights_bytes: file.tensor_bytes(),
        macs_per_token: macs_per_token(&sizes.model),
        rounds: args.rounds,
        peer,
    };
    let report = bench.report(&args, name, loaded.device, load_s)?;
    match args.json {
        true => println!("{}", serde_json::to_string_pretty(&report)?),
        false => report.print(),
    }
    Ok(ExitCode::SUCCESS)
}

/// Multiply-adds of one token with all matrices but the last, and with that.
fn macs_per_token(model: &ModelConfig) -> (u64, u64) {
    let last = (model.hidden_size * model.vocab_size) as u64;
    (model.num_weights() - last, last)
}

struct Bench<'a> {
    runner: &'a mut dyn StepRunner,
    num_blocks: usize,
    max_rows: usize,
    vocab_size: usize,
    weights_bytes: u64,
    macs_per_token: (u64, u64),
    rounds: usize,
    peer: Option<Peer>,
}

impl Bench<'_> {
    fn report(&mut self, args: &EngineBench, model: String, device: String, load_s: f64) -> Result<Report> {
        let ceiling = self.runner.ceiling()?;
        let mut prefill = Vec::new();
        for &len in &args.prompt_lens {
            prefill.push(self.prefill(len)?);
        }
        let mut decode = Vec::new();
        for &count in &args.batch_sizes {
            decode.push(self.decode(count, args.decode_tokens)?);
        }
        let before = self.runner.num_dispatches();
        self.step(&self.decode_input(1, DECODE_PROMPT)?)?;
        let dispatches_a_decode_step = self.runner.num_dispatches() - before;
        let (single, longest) = (1, args.prompt_lens.iter().copied().max().unwrap_or(1));
        let kernels_of_a_decode_step = self.profile(|bench| bench.step(&bench.decode_input(single, DECODE_PROMPT)?))?;
        let kernels_of_a_prefill = self.profile(|bench| bench.prefill_once(longest))?;
        Ok(Report {
            model,
            device,
            weights_bytes: self.weights_bytes,
            load_s,
            copy_gb_per_s: ceiling.map(|ceiling| ceiling.copy_bytes_per_s * 1e-9),
            dot_gmac_per_s: ceiling.map(|ceiling| ceiling.dot_per_s.map(|dots| dots * 1e-9)),
            prefill,
            decode,
            dispatches_a_decode_step,
            kernels_of_a_decode_step,
            kernels_of_a_prefill,
        })
    }

    /// Words that are no special tokens, the same at each call.
    fn tokens(&self, len: usize, seed: usize) -> Vec<u32> {
        (0..len).map(|i| ((1000 + (i + 31 * seed) * 7919) % self.vocab_size) as u32).collect()
    }

    fn blocks(&self, sequence: usize, len: usize) -> Result<Vec<u32>> {
        let count = len.div_ceil(BLOCK_SIZE);
        let first = sequence * count;
        if first + count > self.num_blocks {
            bail!("the KV cache has {} blocks, {} are needed: give --kv-cache-memory", self.num_blocks, first + count);
        }
        Ok((first as u32..(first + count) as u32).collect())
    }

    fn step(&mut self, input: &ModelInput) -> Result<()> {
        self.runner.run(input).context("a step")?;
        Ok(())
    }

    /// A prompt, in as many steps as the settings make of it.
    fn prefill_once(&mut self, len: usize) -> Result<()> {
        let (tokens, blocks) = (self.tokens(len, 0), self.blocks(0, len)?);
        for (index, chunk) in tokens.chunks(self.max_rows).enumerate() {
            let mut input = ModelInput::default();
            input.push(chunk, index * self.max_rows, &blocks, BLOCK_SIZE);
            input.select_last(Choice::Greedy);
            self.step(&input)?;
        }
        Ok(())
    }

    fn prefill(&mut self, len: usize) -> Result<Speed> {
        let prompt = self.tokens(len, 0);
        let (seconds, peer) = self.median(
            |bench| {
                let started = Instant::now();
                bench.prefill_once(len)?;
                Ok(started.elapsed().as_secs_f64())
            },
            |peer| peer.prefill(&prompt),
        )?;
        let steps = len.div_ceil(self.max_rows);
        let macs = self.macs_per_token.0 * len as u64 + self.macs_per_token.1 * steps as u64;
        Ok(self.speed(len, len, steps, macs, seconds, peer))
    }

    /// One token of each of so many sequences that have `len` before it.
    fn decode_input(&self, count: usize, len: usize) -> Result<ModelInput> {
        let mut input = ModelInput { num_decodes: count, ..Default::default() };
        for sequence in 0..count {
            let blocks = self.blocks(sequence, len + 1)?;
            input.push(&self.tokens(1, sequence), len, &blocks, BLOCK_SIZE);
            input.select_last(Choice::Greedy);
        }
        Ok(input)
    }

    fn decode(&mut self, count: usize, num_tokens: usize) -> Result<Speed> {
        let prompts: Vec<Vec<u32>> = (0..count).map(|sequence| self.tokens(DECODE_PROMPT, sequence)).collect();
        let (seconds, peer) = self.median(
            |bench| {
                let len = DECODE_PROMPT + num_tokens;
                let inputs = (DECODE_PROMPT..len).map(|len| bench.decode_input(count, len));
                let inputs = inputs.collect::<Result<Vec<_>>>()?;
                let started = Instant::now();
                inputs.iter().try_for_each(|input| bench.step(input))?;
                Ok(started.elapsed().as_secs_f64())
            },
            |peer| peer.decode(&prompts, num_tokens),
        )?;
        let macs = (self.macs_per_token.0 + self.macs_per_token.1) * (count * num_tokens) as u64;
        Ok(self.speed(count, count * num_tokens, num_tokens, macs, seconds, peer))
    }

    fn speed(
        &self,
        count: usize,
        tokens: usize,
        steps: usize,
        macs: u64,
        seconds: f64,
        peer_tokens_per_s: Option<f64>,
    ) -> Speed {
        let gb_per_s = (self.weights_bytes * steps as u64) as f64 / seconds * 1e-9;
        let gmac_per_s = macs as f64 / seconds * 1e-9;
        Speed { count, tokens_per_s: tokens as f64 / seconds, gb_per_s, gmac_per_s, peer_tokens_per_s }
    }

    /// The medians of our seconds and of the peer's speed, in rounds of both.
    fn median(
        &mut self,
        mut round: impl FnMut(&mut Self) -> Result<f64>,
        peer_round: impl Fn(&Peer) -> Result<f64>,
    ) -> Result<(f64, Option<f64>)> {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..self.rounds {
            ours.push(round(self)?);
            theirs.extend(self.peer.as_ref().map(&peer_round).transpose()?);
        }
        ours.sort_by(f64::total_cmp);
        theirs.sort_by(f64::total_cmp);
        Ok((ours[ours.len() / 2], theirs.get(theirs.len() / 2).copied()))
    }

    fn profile(&mut self, mut work: impl FnMut(&mut Self) -> Result<()>) -> Result<Vec<Kernel>> {
        if !self.runner.start_profile() {
            return Ok(Vec::new());
        }
        work(self)?;
        let times: KernelTimes = self.runner.finish_profile();
        let total: f64 = times.values().map(|time| time.seconds).sum();
        let mut kernels: Vec<Kernel> = times
            .into_iter()
            .map(|(name, time)| Kernel {
                name,
                dispatches: time.count,
                ms: time.seconds * 1e3,
                share: time.seconds / total,
                gmac_per_s: time.work as f64 / time.seconds * 1e-9,
            })
            .collect();
        kernels.sort_by(|a, b| b.ms.total_cmp(&a.ms));
        Ok(kernels)
    }
}

impl Report {
    fn print(&self) {
        println!("{} on {}, loaded in {:.2} s", self.model, self.device, self.load_s);
        if let (Some(copy), Some([one, many])) = (self.copy_gb_per_s, self.dot_gmac_per_s) {
            println!(
                "the device at most: copies {copy:.1} GB/s; products of one token {one:.2}, of {MANY_TOKENS} {many:.2} GMAC/s"
            );
        }
        for (title, of, speeds) in [("prefill", "tokens", &self.prefill), ("decode", "sequences", &self.decode)] {
            for Speed { count, tokens_per_s, gb_per_s, gmac_per_s, peer_tokens_per_s } in speeds {
                let beside = peer_tokens_per_s
                    .map(|peer| format!("   peer {peer:9.1} tok/s, ratio {:6.2}", tokens_per_s / peer))
                    .unwrap_or_default();
                println!(
                    "{title} {count:5} {of:9} {tokens_per_s:9.1} tok/s {gb_per_s:7.2} GB/s {gmac_per_s:7.2} GMAC/s{beside}"
                );
            }
        }
        if self.dispatches_a_decode_step > 0 {
            println!("{} dispatches a decode step", self.dispatches_a_decode_step);
        }
        for (title, kernels) in
            [("a decode step", &self.kernels_of_a_decode_step), ("the longest prefill", &self.kernels_of_a_prefill)]
        {
            if kernels.is_empty() {
                continue;
            }
            println!("{title}, by kernel:");
            for Kernel { name, dispatches, ms, share, gmac_per_s } in kernels {
                let share = share * 100.0;
                println!("  {name:28} {dispatches:5} dispatches {ms:9.3} ms {share:5.1} % {gmac_per_s:7.2} G/s");
            }
        }
    }
}
