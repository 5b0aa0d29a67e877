//! `pagoda`: one binary that serves large language models on whatever GPUs people have.
//!
//! This file is the command line; each subcommand is a file of its own.

mod bench;
mod cache;
mod devices;
mod explain;
mod flags;
mod hub;
mod logging;
mod model;
mod pull;
mod route;
mod run;
mod serve;
mod settings;
mod tiers;
mod vllm_flags;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// For the router, whose short requests are many small allocations: 0.046 and 0.050 CPU seconds a 1,000 in two runs of
/// `benches/router.rs` with it, 0.053 in the last without.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Exit status when a device failed: whoever supervises the process restarts it.
const EXIT_DEVICE_FAILED: u8 = 70;

#[derive(Parser)]
#[command(name = "pagoda", version, about = "Serves large language models on whatever GPUs people have.")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Answer one prompt, or chat, in the terminal.
    Run(Box<run::RunArgs>),
    /// Serve the OpenAI API over HTTP.
    Serve(Box<serve::ServeArgs>),
    /// Route requests to many engines behind one address.
    Route(Box<route::RouteArgs>),
    /// Ask a router how it would route a request, and why.
    Explain(explain::ExplainArgs),
    /// Keep KV blocks on a disk for many engines, or look after a directory of them.
    Cache(Box<cache::CacheArgs>),
    /// Measure how fast a model runs on a device.
    Bench(bench::BenchArgs),
    /// List the devices that can run models, and what `auto` takes.
    Devices,
    /// Fetch a model and print its path.
    Pull(pull::PullArgs),
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return refuse(&error),
    };
    let result = match cli.command {
        Command::Run(args) => run::run(*args),
        Command::Serve(args) => serve::serve(*args),
        Command::Route(args) => route::route(*args),
        Command::Bench(args) => bench::bench(args),
        Command::Explain(args) => explain::explain(args),
        Command::Cache(args) => cache::cache(*args),
        Command::Devices => devices::devices(),
        Command::Pull(args) => pull::pull(&args),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Prints help, the version, or what is wrong with the command line.
fn refuse(error: &clap::Error) -> ExitCode {
    match vllm_flags::explain(error) {
        Some(message) => eprintln!("error: {message}"),
        // Nothing is left to do when even the message cannot be printed.
        None => drop(error.print()),
    }
    u8::try_from(error.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from)
}
