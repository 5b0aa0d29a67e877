//! Models named `hf:ORGANISATION/REPOSITORY[/FILE][@REVISION]`: fetched from the Hugging Face hub into its cache, where other
//! programs find them too.
//!
//! Called by `pull` and wherever a model is opened. `HF_TOKEN`, `HF_ENDPOINT`, `HF_HOME` and `HF_HUB_OFFLINE` mean what they
//! mean elsewhere; progress bars and the resumption of what broke off are the `hf-hub` crate's.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use hf_hub::api::sync::{Api, ApiBuilder};
use hf_hub::{Cache, Repo, RepoType};

/// Tries of one download after the first, each resuming where the last ended.
const RETRIES: usize = 3;
/// The storage type that is taken where a repository has many and none was named.
const USUAL_STORAGE: &str = "Q4_K_M";
/// What a directory needs beside its weights, where the repository has it.
const BESIDE_WEIGHTS: [&str; 4] =
    ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"];
const CONFIG: &str = "config.json";
const INDEX: &str = "model.safetensors.index.json";

/// A model of the hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubModel {
    /// `ORGANISATION/REPOSITORY`.
    pub repository: String,
    file: Option<String>,
    revision: String,
}

/// The hub as the environment names it.
///
/// # Errors
/// When its settings cannot be used.
pub fn api() -> Result<Api> {
    let token = std::env::var("HF_TOKEN").ok().or_else(|| Cache::from_env().token());
    Ok(ApiBuilder::from_env().with_token(token).with_retries(RETRIES).build()?)
}

/// Whether the hub may not be asked.
pub fn is_offline() -> bool {
    std::env::var("HF_HUB_OFFLINE").is_ok_and(|value| matches!(value.as_str(), "1" | "true" | "TRUE" | "yes"))
}

impl HubModel {
    /// Reads a model's name; `None` where it is a path.
    ///
    /// # Errors
    /// When it begins like one of the hub's and is none.
    pub fn parse(text: &str) -> Option<Result<Self>> {
        let rest = text.strip_prefix("hf:")?;
        let (path, revision) = rest.rsplit_once('@').unwrap_or((rest, "main"));
        let mut parts = path.splitn(3, '/');
        let named = (parts.next(), parts.next(), parts.next());
        Some(match named {
            (Some(organisation), Some(repository), file)
                if [organisation, repository, revision].into_iter().all(is_path) && file.is_none_or(is_path) =>
            {
                let repository = format!("{organisation}/{repository}");
                Ok(Self { repository, file: file.map(str::to_owned), revision: revision.to_owned() })
            }
            _ => Err(anyhow!("{text}: should be hf:ORGANISATION/REPOSITORY[/FILE][@REVISION]")),
        })
    }

    /// Where the model is, on this machine: fetched where it is not there yet.
    ///
    /// # Errors
    /// When the hub has no such model, does not let it go, or is not reached.
    pub fn fetch(&self) -> Result<PathBuf> {
        let repo = Repo::with_revision(self.repository.clone(), RepoType::Model, self.revision.clone());
        let cached = |name: &str| Cache::from_env().repo(repo.clone()).get(name);
        if is_offline() {
            let name = self.file.as_deref().unwrap_or(CONFIG);
            let path = cached(name).with_context(|| {
                format!("{}: {name} is not in the hub's cache, and HF_HUB_OFFLINE is set", self.repository)
            })?;
            return if self.file.is_some() { Ok(path) } else { parent(path) };
        }
        let api = api()?.repo(repo.clone());
        let get = |name: &str| api.get(name).with_context(|| format!("{}: fetching {name}", self.repository));
        if let Some(file) = &self.file {
            return fetch_parts(file, &get);
        }
        let names: Vec<String> = match api.info() {
            // A hub says what it likes; files stay where they belong.
            Ok(info) => {
                info.siblings.into_iter().map(|sibling| sibling.rfilename).filter(|name| is_path(name)).collect()
            }
            Err(error) => match cached(CONFIG) {
                Some(path) => {
                    eprintln!("{}: the hub is not reached ({error}); what its cache has is used", self.repository);
                    return parent(path);
                }
                None => {
                    return Err(error).with_context(|| format!("{}: asking the hub for its files", self.repository));
                }
            },
        };
        self.fetch_all(&names, &get)
    }

    /// Of a repository's files: a directory of weights, or the one GGUF file that is meant.
    fn fetch_all(&self, names: &[String], get: &impl Fn(&str) -> Result<PathBuf>) -> Result<PathBuf> {
        let has = |name: &str| names.iter().any(|other| other == name);
        let weights: Vec<&String> =
            names.iter().filter(|name| name.ends_with(".safetensors") && !name.contains('/')).collect();
        if has(CONFIG) && !weights.is_empty() {
            let config = get(CONFIG)?;
            for name in BESIDE_WEIGHTS.iter().filter(|name| has(name)) {
                get(name)?;
            }
            if has(INDEX) {
                for name in indexed(&get(INDEX)?)? {
                    get(&name)?;
                }
            } else {
                for name in weights {
                    get(name)?;
                }
            }
            return parent(config);
        }
        let files: Vec<&String> = names.iter().filter(|name| name.ends_with(".gguf") && is_first_part(name)).collect();
        let usual: Vec<&&String> = files.iter().filter(|name| name.to_uppercase().contains(USUAL_STORAGE)).collect();
        match (files.as_slice(), usual.as_slice()) {
            ([file], _) => fetch_parts(file, get),
            (_, [file]) => fetch_parts(file, get),
            ([], _) => bail!("{}: has neither safetensors with a {CONFIG} nor a GGUF file", self.repository),
            _ => {
                let listed = files.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(", ");
                bail!("{}: name one of its files, as hf:{}/FILE: {listed}", self.repository, self.repository)
            }
        }
    }
}

/// Whether a name is a path below where it is put.
fn is_path(name: &str) -> bool {
    !name.contains('\\') && name.split('/').all(|part| !part.is_empty() && part != "." && part != "..")
}

/// The files that an index of weights names.
fn indexed(index: &Path) -> Result<BTreeSet<String>> {
    let text = std::fs::read(index).with_context(|| format!("reading {}", index.display()))?;
    let json: serde_json::Value = serde_json::from_slice(&text).with_context(|| format!("{}", index.display()))?;
    let map = json["weight_map"].as_object().with_context(|| format!("{}: has no `weight_map`", index.display()))?;
    let names: BTreeSet<String> = map.values().filter_map(|name| name.as_str()).map(str::to_owned).collect();
    match names.iter().find(|name| !is_path(name)) {
        Some(name) => bail!("{}: names `{name}`, which is no file's name", index.display()),
        None => Ok(names),
    }
}

fn parent(path: PathBuf) -> Result<PathBuf> {
    path.parent().map(PathBuf::from).with_context(|| format!("{} is in no directory", path.display()))
}

/// (stem, number of parts) of a part's name, `STEM-00001-of-00003.gguf`.
fn parts_of(name: &str) -> Option<(&str, &str, u32)> {
    let (rest, total) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    (number.len() == 5 && total.len() == 5).then_some((stem, number, total.parse().ok()?))
}

fn is_first_part(name: &str) -> bool {
    parts_of(name).is_none_or(|(_, number, _)| number == "00001")
}

/// Fetches a file, and the other parts where it is one of several; the first part's path.
fn fetch_parts(name: &str, get: &impl Fn(&str) -> Result<PathBuf>) -> Result<PathBuf> {
    let Some((stem, _, total)) = parts_of(name) else { return get(name) };
    let path = get(&format!("{stem}-00001-of-{total:05}.gguf"))?;
    for number in 2..=total {
        get(&format!("{stem}-{number:05}-of-{total:05}.gguf"))?;
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_apart() {
        let parse =
            |text: &str| HubModel::parse(text).unwrap().map(|model| (model.repository, model.file, model.revision));
        let named = |repository: &str, file: Option<&str>, revision: &str| {
            (repository.to_owned(), file.map(str::to_owned), revision.to_owned())
        };
        assert_eq!(parse("hf:a/b").unwrap(), named("a/b", None, "main"));
        assert_eq!(parse("hf:a/b/sub/c.gguf@v1").unwrap(), named("a/b", Some("sub/c.gguf"), "v1"));
        for wrong in ["hf:a", "hf:/b", "hf:a/b@", "hf:a/b/../c", "hf:a/b@../x", "hf:"] {
            assert!(parse(wrong).unwrap_err().to_string().contains("hf:ORGANISATION/REPOSITORY"), "{wrong}");
        }
        assert!(HubModel::parse("a/b.gguf").is_none());
    }

    #[test]
    fn names_that_lead_elsewhere_are_none() {
        assert!(is_path("a.gguf") && is_path("sub/a.gguf"));
        for wrong in ["", "../a", "/a", "a/../b", "a//b", "a\\b", ".", "sub/"] {
            assert!(!is_path(wrong), "{wrong}");
        }
        let directory = tempfile::tempdir().unwrap();
        let index = directory.path().join("index.json");
        let write = |text: &str| std::fs::write(&index, text).unwrap();
        write(r#"{"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "c": "one.safetensors"}}"#);
        assert_eq!(indexed(&index).unwrap().len(), 2);
        write(r#"{"weight_map": {"a": "../../x"}}"#);
        assert!(indexed(&index).unwrap_err().to_string().contains("../../x"));
    }

    #[test]
    fn of_many_files_the_usual_one_is_taken_with_its_parts() {
        let model = HubModel::parse("hf:a/b").unwrap().unwrap();
        let fetched = std::cell::RefCell::new(Vec::new());
        let get = |name: &str| -> Result<PathBuf> {
            fetched.borrow_mut().push(name.to_owned());
            Ok(PathBuf::from(name))
        };
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        let many = names(&["m-Q8_0.gguf", "m-q4_k_m-00001-of-00002.gguf", "m-q4_k_m-00002-of-00002.gguf"]);
        assert_eq!(model.fetch_all(&many, &get).unwrap(), PathBuf::from("m-q4_k_m-00001-of-00002.gguf"));
        assert_eq!(fetched.borrow().len(), 2);
        let error = model.fetch_all(&names(&["m-Q8_0.gguf", "m-Q5_0.gguf"]), &get).unwrap_err().to_string();
        assert!(error.contains("m-Q8_0.gguf, m-Q5_0.gguf") && error.contains("hf:a/b/FILE"), "{error}");
        assert!(model.fetch_all(&names(&["README.md"]), &get).is_err());
    }
}
