//! Which model file a command uses, and what is read from it before the engine starts.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use cache_tier::TieredStore;
use engine::chat_template::ChatTemplate;
use engine::engine_loop::{self, EngineHandle};
use engine::model_file::ModelFile;
use engine::sim::SimProfile;
use engine::tokenizer::Tokenizer;

use crate::hub::HubModel;
use crate::pull;
use crate::settings::Settings;

/// A model on its way onto a device.
pub struct StartedModel {
    /// The engine, loading.
    pub engine: EngineHandle,
    /// Its tokeniser.
    pub tokenizer: Arc<Tokenizer>,
    /// Its chat template, if the file has one.
    pub chat_template: Option<ChatTemplate>,
    /// The names that it is served under; the first is reported.
    pub names: Vec<String>,
}

/// Opens the settings' model (fetching the default one) and starts its engine over these KV tiers, or
/// that of a simulated device.
pub fn start(settings: &Settings, tiers: Option<Arc<TieredStore>>) -> Result<StartedModel> {
    if let Some(profile) = settings.device.strip_prefix("sim:") {
        return start_sim(settings, SimProfile::load(profile)?, tiers);
    }
    let (path, own_name) = find(settings.model.as_deref())?;
    let file = ModelFile::open(&path)?;
    let tokenizer = Arc::new(Tokenizer::of(&file)?);
    let chat_template = ChatTemplate::of(&file, &tokenizer)?;
    let names = names(settings, own_name);
    let config = settings.engine(path, &names[0])?;
    let engine = engine_loop::spawn(config, file, Arc::clone(&tokenizer), tiers)?;
    Ok(StartedModel { engine, tokenizer, chat_template, names })
}

/// Where a model is, fetched where it is not there, and what it is served as.
pub fn find(model: Option<&Path>) -> Result<(PathBuf, String)> {
    let named = |path: PathBuf| {
        let name = served_name(&path);
        (path, name)
    };
    match model {
        None => pull::default_model().map(named),
        Some(path) => match path.to_str().and_then(HubModel::parse) {
            Some(model) => {
                let model = model?;
                Ok((model.fetch()?, model.repository))
            }
            None => Ok(named(path.to_owned())),
        },
    }
}

fn start_sim(settings: &Settings, profile: SimProfile, tiers: Option<Arc<TieredStore>>) -> Result<StartedModel> {
    let (tokenizer, chat_template) = match &profile.model {
        None => (Tokenizer::bytes4(), Some(ChatTemplate::plain()?)),
        Some(path) => {
            let file = ModelFile::open(path)?;
            let tokenizer = Tokenizer::of(&file)?;
            let chat_template = ChatTemplate::of(&file, &tokenizer)?;
            (tokenizer, chat_template)
        }
    };
    let tokenizer = Arc::new(tokenizer);
    let names = names(settings, profile.name.clone());
    let config = settings.engine(PathBuf::new(), &names[0])?;
    let engine = engine_loop::spawn_sim(&config, profile, Arc::clone(&tokenizer), tiers)?;
    Ok(StartedModel { engine, tokenizer, chat_template, names })
}

/// The names that were asked for, else the model's own.
fn names(settings: &Settings, own: String) -> Vec<String> {
    if settings.served_model_name.is_empty() { vec![own] } else { settings.served_model_name.clone() }
}

/// `SmolLM2-135M-Instruct.Q4_1.gguf` is served as `SmolLM2-135M-Instruct`: the storage type is no part of the name.
fn served_name(path: &Path) -> String {
    // A directory has its own name, dots and all.
    if path.is_dir() {
        let name = path.canonicalize().ok().and_then(|path| path.file_name().map(PathBuf::from));
        return name.map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned());
    }
    let stem = path.file_stem().map_or_else(|| PathBuf::from("model"), PathBuf::from);
    let text = stem.to_string_lossy().into_owned();
    match text.rsplit_once('.') {
        Some((name, storage)) if storage.starts_with(['Q', 'F', 'q', 'f', 'I', 'B']) && !name.is_empty() => {
            name.to_owned()
        }
        _ => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_storage_type_is_no_part_of_the_name() {
        assert_eq!(served_name(Path::new("/m/SmolLM2-135M-Instruct.Q4_1.gguf")), "SmolLM2-135M-Instruct");
        assert_eq!(served_name(Path::new("llama-3.2-1b.gguf")), "llama-3.2-1b");
        assert_eq!(served_name(Path::new("tiny.gguf")), "tiny");
    }
}
