"""Do the widgets of a page answer, in a real browser? check.py asks this for each page with one."""

from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.remote.webelement import WebElement


def state(widget: WebElement) -> str:
    """What a reader sees: the sentence and the picture."""
    parts = widget.find_elements(By.CSS_SELECTOR, "[aria-live], svg")
    return "".join(part.get_attribute("outerHTML") or "" for part in parts)


def widgets_answer(driver: WebDriver, address: str) -> list[str]:
    """What is wrong with the widgets of a page: each must answer to a drag, a key and a click."""
    driver.get(address)
    found = driver.find_elements(By.CLASS_NAME, "widget")
    wrong = [] if found else [f"{address}: no widget"]
    for widget in found:
        name = f"{address}: {widget.get_attribute('data-widget')}"
        sliders = [
            each for each in widget.find_elements(By.TAG_NAME, "input") if each.is_displayed()
        ]
        buttons = widget.find_elements(By.CSS_SELECTOR, "[data-do=next]")
        clicked = buttons or widget.find_elements(By.CSS_SELECTOR, "option:last-child")
        if not sliders or not clicked:
            wrong.append(f"{name} has no slider, or nothing to click")
            continue
        driver.execute_script(
            "arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", sliders[0]
        )
        thumb = ActionChains(driver).move_to_element(sliders[0]).click_and_hold()
        drag = thumb.move_by_offset(-sliders[0].size["width"] // 3, 0).release()
        key = ActionChains(driver).send_keys_to_element(sliders[0], Keys.ARROW_RIGHT)
        for what, move in {
            "drag": drag.perform,
            "key": key.perform,
            "click": clicked[0].click,
        }.items():
            before = state(widget)
            move()
            if state(widget) == before:
                wrong.append(f"{name} does not answer to a {what}")
        wide = "return arguments[0].scrollWidth > arguments[0].clientWidth"
        if driver.execute_script(wide, widget):
            wrong.append(f"{name} is wider than its place")
    return wrong
