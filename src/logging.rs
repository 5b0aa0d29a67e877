//! Logs: to standard error, filtered by `PAGODA_LOG` (`info` where unset), as text or JSON.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

use crate::settings::LogFormat;

/// Installs the subscriber. `quiet` shows warnings only: for the terminal chat.
pub fn start(format: LogFormat, quiet: bool) {
    let default =
        if quiet { "warn" } else { "info,wgpu_core=warn,wgpu_hal=warn,naga=warn,cubecl_wgpu=warn,cubecl_runtime=warn" };
    let filter = EnvFilter::try_from_env("PAGODA_LOG").unwrap_or_else(|_| EnvFilter::new(default));
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let builder = builder.with_ansi(std::io::stderr().is_terminal());
    match format {
        LogFormat::Text => builder.init(),
        LogFormat::Json => builder.json().init(),
    }
}
