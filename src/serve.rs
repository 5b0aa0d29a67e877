//! `pagoda serve`: the OpenAI API over HTTP, until SIGTERM or the device fails.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use clap::Args;
use engine::engine_loop::{EngineHandle, EngineState};
use engine::server::{self, Server, ServerConfig};
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::model::{self, StartedModel};
use crate::settings::{EngineFlags, ServerFlags, Settings};
use crate::{EXIT_DEVICE_FAILED, logging};

/// Arguments of `pagoda serve`.
#[derive(Args)]
pub struct ServeArgs {
    #[command(flatten)]
    engine: EngineFlags,
    #[command(flatten)]
    server: ServerFlags,
}

/// Error events of running streams get this long to reach their clients after the device failed.
const FAILURE_GRACE: Duration = Duration::from_secs(1);

/// Serves until told to stop.
pub fn serve(args: ServeArgs) -> Result<ExitCode> {
    let settings = Settings::load(&args.engine, &args.server)?;
    logging::start(settings.log_format, false);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("starting the runtime")?;
    let code = runtime.block_on(run(&settings));
    // A stream that outlived the shutdown timeout is cut here.
    runtime.shutdown_background();
    code
}

async fn run(settings: &Settings) -> Result<ExitCode> {
    let address = format!("{}:{}", settings.host, settings.port);
    let listener = TcpListener::bind(&address).await.with_context(|| format!("listening on {address}"))?;
    let StartedModel { engine, tokenizer, chat_template, name } = model::start(settings)?;
    let names = if settings.served_model_name.is_empty() { vec![name] } else { settings.served_model_name.clone() };
    let config = ServerConfig {
        served_model_names: names,
        allowed_origins: settings.allowed_origins.clone(),
        max_body_bytes: settings.max_body_bytes()?,
    };
    let server = Server::new(engine.clone(), tokenizer, chat_template, config);
    let router = server::router(Arc::clone(&server)).map_err(|error| anyhow!(error)).context("--allowed-origins")?;
    tracing::info!(address = %listener.local_addr()?, "listening");
    let (stop_sender, stop) = watch::channel(false);
    let serving =
        tokio::spawn(async move { axum::serve(listener, router).with_graceful_shutdown(stopped(stop)).await });
    let code = tokio::select! {
        code = engine_ended(engine) => code?,
        () = told_to_stop() => {
            server.drain();
            tracing::info!(timeout_s = settings.shutdown_timeout, "stopping: running streams may finish");
            ExitCode::SUCCESS
        }
    };
    server.drain();
    stop_sender.send_replace(true);
    let grace = if code == ExitCode::SUCCESS { Duration::from_secs(settings.shutdown_timeout) } else { FAILURE_GRACE };
    match tokio::time::timeout(grace, serving).await {
        Ok(served) => served.context("the server's task")?.context("serving")?,
        Err(_) => tracing::warn!(grace_s = grace.as_secs(), "streams were still running and are cut"),
    }
    Ok(code)
}

async fn stopped(mut stop: watch::Receiver<bool>) {
    // The sender lives as long as the server; its loss means stop as well.
    drop(stop.wait_for(|stop| *stop).await);
}

/// Waits for the engine to fail, reporting when it is ready on the way.
async fn engine_ended(engine: EngineHandle) -> Result<ExitCode> {
    let mut state = engine.watch();
    drop(engine);
    loop {
        let current = state.borrow_and_update().clone();
        match current {
            EngineState::Loading(..) => {}
            EngineState::Ready(device) => tracing::info!(device, "ready"),
            EngineState::LoadFailed(reason) => return Err(anyhow!(reason)),
            EngineState::Failed(reason) => {
                tracing::error!(reason, "the engine failed");
                return Ok(ExitCode::from(EXIT_DEVICE_FAILED));
            }
        }
        if state.changed().await.is_err() {
            tracing::error!("the engine thread has ended");
            return Ok(ExitCode::from(EXIT_DEVICE_FAILED));
        }
    }
}

#[cfg(unix)]
async fn told_to_stop() {
    use tokio::signal::unix::{SignalKind, signal};
    let Ok(mut terminate) = signal(SignalKind::terminate()) else { return std::future::pending().await };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = tokio::signal::ctrl_c() => {}
    }
}

#[cfg(not(unix))]
async fn told_to_stop() {
    drop(tokio::signal::ctrl_c().await);
}
