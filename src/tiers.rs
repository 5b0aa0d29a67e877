//! The KV tiers of `pagoda serve`: what `--kv-host-bytes`, `--kv-disk` and `--kv-tier` ask for, opened.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use cache_tier::remote::{Connector, RemoteLimits, RemoteStore, RemoteUrl, TcpConnector, TlsConnector};
use cache_tier::{DiskConfig, DiskStore, HostStore, Store, TieredStore};
use protocol::Codec;

use crate::flags::KvCompression;
use crate::settings::Settings;

/// Opens the tiers; none where none is asked for.
pub fn open(settings: &Settings) -> Result<Arc<TieredStore>> {
    let host_bytes = settings.kv_host_bytes()?;
    settings.check_tiers()?;
    let token = settings.kv_tier.as_ref().map(|_| settings.read_cluster_token()).transpose()?.flatten();
    // Before the directory is opened, which may delete what is over a cap.
    let remote = match &settings.kv_tier {
        None => None,
        Some(url) => Some(remote(url, settings.kv_tier_cafile.as_deref(), token.as_deref()).context("--kv-tier")?),
    };
    let disk = match &settings.kv_disk {
        None => None,
        Some(directory) => {
            let config = DiskConfig { directory: directory.clone(), capacity_bytes: settings.kv_disk_bytes()? };
            Some(Arc::new(DiskStore::open(config).context("--kv-disk")?))
        }
    };
    if let Some(remote) = &remote {
        tracing::info!(tier = remote.address(), token = token.is_some(), "KV blocks are shared by a tier");
    }
    let host = host_bytes.map(HostStore::new);
    let codec = match settings.kv_compression {
        KvCompression::None => None,
        KvCompression::Zstd => Some(Codec::Zstd),
    };
    let remote = remote.map(|remote| Arc::new(remote) as Arc<dyn Store>);
    Ok(Arc::new(TieredStore::new(host, disk, remote, codec)))
}

/// The client of a tier at a URL.
pub fn remote(url: &str, cafile: Option<&Path>, token: Option<&str>) -> Result<RemoteStore> {
    let url = RemoteUrl::parse(url).map_err(|error| anyhow!(error))?;
    let connector: Arc<dyn Connector> = match (url.tls, cafile) {
        (false, None) => Arc::new(TcpConnector(url.address)),
        (true, Some(cafile)) => Arc::new(TlsConnector::new(&url.address, cafile).map_err(|error| anyhow!(error))?),
        (true, None) => bail!(
            "https://{} wants a file of the certificates that are trusted (--kv-tier-cafile; --cafile of `pagoda cache`)",
            url.address
        ),
        (false, Some(_)) => {
            bail!("http://{} is not encrypted: there are no certificates to trust by a file", url.address)
        }
    };
    Ok(RemoteStore::new(connector, token, RemoteLimits::default()))
}
