//! `pagoda explain`: how a router would route a request, and why.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use serde_json::Value;

use crate::settings::read_token;

/// Arguments of `pagoda explain`.
#[derive(Args)]
pub struct ExplainArgs {
    /// The router's internal listener, HOST:PORT.
    #[arg(long, value_name = "ADDRESS")]
    router: String,
    /// File of the cluster's token.
    #[arg(long, value_name = "FILE")]
    cluster_token_file: Option<PathBuf>,
    /// Print the answer as it came.
    #[arg(long)]
    json: bool,
    /// File of the request's JSON body; standard input where there is none.
    #[arg(value_name = "FILE")]
    body: Option<PathBuf>,
}

/// For the answer.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Asks and prints.
pub fn explain(args: ExplainArgs) -> Result<ExitCode> {
    let mut body = Vec::new();
    match &args.body {
        Some(path) => body = std::fs::read(path).with_context(|| path.display().to_string())?,
        None => drop(std::io::stdin().read_to_end(&mut body).context("reading the request")?),
    }
    let token = args.cluster_token_file.as_deref().map(read_token).transpose()?;
    let (status, answer) = ask(&args.router, token.as_deref(), &body)?;
    if status != 200 {
        bail!("{}: {status}: {}", args.router, answer["error"]["message"].as_str().unwrap_or("no reason given"));
    }
    if args.json {
        println!("{answer:#}");
    } else {
        print!("{}", table(&answer));
    }
    Ok(ExitCode::SUCCESS)
}

fn ask(address: &str, token: Option<&str>, body: &[u8]) -> Result<(u16, Value)> {
    let mut stream = TcpStream::connect(address).with_context(|| format!("connecting to {address}"))?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    let token = token.map_or_else(String::new, |token| format!("authorization: Bearer {token}\r\n"));
    let len = body.len();
    // HTTP/1.0: the body is not in chunks.
    let head = format!("POST /internal/v1/explain HTTP/1.0\r\nhost: {address}\r\n{token}content-length: {len}\r\n\r\n");
    stream.write_all(head.as_bytes())?;
    stream.write_all(body)?;
    let mut text = String::new();
    stream.read_to_string(&mut text).with_context(|| format!("the answer of {address}"))?;
    let (head, body) = text.split_once("\r\n\r\n").ok_or_else(|| anyhow!("{address} does not speak HTTP"))?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    Ok((status, serde_json::from_str(body).unwrap_or_default()))
}

/// Workers, best first, with each scorer's score times its weight.
fn table(answer: &Value) -> String {
    use std::fmt::Write;
    let mut text = format!("prompt     about {} tokens\n", answer["num_tokens"]);
    let empty = Vec::new();
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    for worker in answer["scores"].as_array().unwrap_or(&empty) {
        let name = worker["worker"].as_str().unwrap_or_default();
        let mark = if worker["worker"] == answer["winner"] { "->" } else { "  " };
        let total = worker["total"].as_f64().unwrap_or(0.0);
        let (held, requests) = (&worker["held_tokens"], &worker["num_requests"]);
        // Writing to a string does not fail.
        let _written = writeln!(text, "{mark} {total:6.3}  {name}  holds {held} tokens, has {requests} requests");
        for part in list(&worker["parts"]) {
            let (scorer, weight, score) = (part[0].as_str(), part[1].as_f64(), part[2].as_f64());
            let (weight, score) = (weight.unwrap_or(0.0), score.unwrap_or(0.0));
            let _written = writeln!(text, "           {weight:4.2} x {score:5.3}  {}", scorer.unwrap_or_default());
        }
    }
    for refused in list(&answer["filtered"]) {
        let (name, why) = (refused[0].as_str().unwrap_or_default(), refused[1].as_str().unwrap_or_default());
        let _written = writeln!(text, "   passed over: {name} ({why})");
    }
    text
}
